"""What the pages and the Makefile name is there: files, functions of docs/architecture.md."""

import re
import shlex
from pathlib import Path

import pytest

from hybridrl.config.compose import check, register

ROOT = Path(__file__).parents[1]
ARCHITECTURE = (ROOT / "docs/architecture.md").read_text()
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("recipes/**/*.md")]
FILE = re.compile(r"[\w.-]+(?:/[\w.-]+)+\.(?:py|sh|yaml|sbatch|txt)\b")
PLACES = ("", "hybridrl", "docs", "recipes")
"""What a path in a page may be relative to, besides the page's own folder."""
MADE = ("my/", "runs/", "DIR/", "RUN/", "path/")
"""What the first folder of a reader's own file is."""
STEP = re.compile(r"^\d+\. `([\w/.]+)` (`.*?`): ", re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_a_page_names_exist(page: Path) -> None:
    """A path as `runtime/launchers.py`, with or without the package's name before it."""
    text = page.read_text()
    named = {match[0] for match in FILE.finditer(text) if text[match.start() - 1] not in "/:."}
    missing = [
        name
        for name in named
        if not name.startswith(MADE)
        and not any((ROOT / place / name).exists() for place in (*PLACES, page.parent))
    ]
    assert not missing


def test_files_that_the_makefile_names_exist() -> None:
    named = re.findall(r"(?<![\w./])(?:tests|scripts)/[\w./-]*\w", (ROOT / "Makefile").read_text())
    assert len(named) > 40
    assert [name for name in named if not (ROOT / name).exists()] == []


RUN = re.compile(r"^(?:    )?hybridrl (?:train|eval|submit) (.*)$", re.MULTILINE)
COMMANDS = {
    command: page.name
    for page in ROOT.glob("docs/*.md")
    if page.name not in ("start.md", "write.md")  # tests/test_readme.py runs theirs
    for command in RUN.findall(page.read_text().replace("\\\n", " "))
    if not {"...", "-m", "--checkpoints"} & set(command.split())
}


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: f"{COMMANDS[command]}: {command}")
def test_commands_of_the_pages_compose(command: str) -> None:
    register()
    assert check(shlex.split(command, comments=True)).run.dir


BARE = re.compile(r"`(\w+\.py)`")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_modules_that_a_page_names_exist(page: Path, tracked_files: list[Path]) -> None:
    """A file's name alone, as `admission.py`; `mine.py` is the reader's."""
    known = {file.name for file in tracked_files} | {"mine.py"}
    assert set(BARE.findall(page.read_text())) <= known


def anchors(page: Path) -> set[str]:
    """The links that a page's headings make, as GitHub spells them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_to_headings_lead_to_one(page: Path) -> None:
    links = re.findall(r"\]\((?!https?://)([^)#]*)#([^)]+)\)", page.read_text())
    assert not [
        f"{name}#{heading}"
        for name, heading in links
        if heading not in anchors(page.parent / name if name else page)
    ]


def test_a_reward_is_followed_through_few_files() -> None:
    """From the key to the value and its metric: the list's files, the yaml and the recipe."""
    steps = ARCHITECTURE.partition("## The life of a reward")[2].partition("\n## ")[0]
    assert 15 < len({file for file, _ in STEP.findall(steps)}) + 2 <= 21


def test_functions_that_the_architecture_names_exist() -> None:
    steps = STEP.findall(ARCHITECTURE)
    assert len(steps) > 35
    missing = []
    for file, opened in steps:
        code = (ROOT / "hybridrl" / file).read_text()
        missing += [
            f"{file}: {name}"
            for name in re.findall(r"`(\w+)`", opened)
            if not re.search(rf"\b(?:def|class) {name}\b", code)
        ]
    assert not missing
