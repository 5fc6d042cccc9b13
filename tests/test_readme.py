"""README.md and the pages that continue it do what they say: files are written, commands run.

In the order of PAGES, since a command may use what an earlier one has made.

A comment above a fenced block says how (a ```bash block without one runs in the fast tests):

    <!-- file: PATH -->            the block is this file
    <!-- test: slow ARGUMENTS -->  runs in the slow tests; ARGUMENTS are added to its last command,
                                   to make it small. needs=MODULE skips it where that is missing
    <!-- test: skip REASON -->     not run
"""

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from _pytest.mark.structures import ParameterSet

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = [README, ROOT / "docs/start.md", ROOT / "docs/write.md"]
TEXT = "\n".join(page.read_text() for page in PAGES)
BLOCK = re.compile(
    r"^(?:<!-- (?P<kind>test|file): (?P<note>.*?) -->\n)?```(?P<language>\w*)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
LINK = re.compile(r"\]\((?!https?://|#)([^)#]+)")
STAMPS = (".core", ".dev", ".smollm2")


@dataclass(frozen=True)
class Command:
    """A bash block and how to run it."""

    text: str
    mode: str  # fast, slow or skip
    arguments: str

    @property
    def needs(self) -> str | None:
        """The module that it cannot do without."""
        match = re.search(r"needs=(\w+)", self.arguments)
        return match[1] if match else None

    @property
    def script(self) -> str:
        """What bash runs: in a copy of the tree instead of a clone, arguments at the end."""
        return f"set -e\n{self.text.strip()} {re.sub('needs=.*', '', self.arguments)}"


def commands(markdown: str) -> list[Command]:
    """Every bash block, in order."""
    blocks = []
    for block in BLOCK.finditer(markdown):
        if block["language"] == "bash":
            mode, _, arguments = (block["note"] or "fast").partition(" ")
            assert mode in ("fast", "slow", "skip"), block[0]
            assert mode != "skip" or arguments, f"a skip needs a reason: {block[0]}"
            blocks.append(Command(block["text"], mode, arguments))
    return blocks


def files(markdown: str) -> dict[str, str]:
    """Path -> text of every block that is a file."""
    blocks = BLOCK.finditer(markdown)
    return {block["note"]: block["text"] for block in blocks if block["kind"] == "file"}


COMMANDS = commands(TEXT)


def parameters(mode: str) -> list[ParameterSet]:
    """The commands of a mode, named by their last line."""
    chosen = [command for command in COMMANDS if command.mode == mode]
    return [pytest.param(c, id=c.text.strip().splitlines()[-1].strip()[:60]) for c in chosen]


def run(command: Command, folder: Path, programs: Path) -> None:
    """Run it in `folder`, with `programs` first on PATH; fails with what it printed."""
    env = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "HF_HUB_OFFLINE": "1"}
    env.pop("PYTHONPATH", None)
    done = subprocess.run(
        ["bash", "-c", command.script], cwd=folder, env=env, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{command.script}\n{done.stdout}\n{done.stderr}"


@pytest.fixture(scope="module")
def clone(
    tmp_path_factory: pytest.TempPathFactory,
    copy_tree: Callable[[Path], Path],
    install_into: Callable[..., None],
) -> Path:
    """The tree with the pages' files, in which `make` finds nothing left to install.

    The commands share it, as a reader's would: later ones use what earlier ones made.
    """
    folder = copy_tree(tmp_path_factory.mktemp("readme"))
    for name, text in files(TEXT).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    install_into(folder / ".venv", "-e", folder)
    for stamp in STAMPS:
        (folder / ".venv/bin" / stamp).touch()
    return folder


@pytest.mark.layouts
@pytest.mark.parametrize("command", parameters("fast"))
def test_commands(command: Command, tmp_path: Path) -> None:
    run(command, tmp_path, Path(sys.executable).parent)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("command", parameters("slow"))
def test_runs(command: Command, clone: Path) -> None:
    if command.needs and importlib.util.find_spec(command.needs) is None:
        pytest.skip(f"{command.needs} is not installed (a make target installs it)")
    run(command, clone, clone / ".venv/bin")


def test_every_command_is_found() -> None:
    assert len(COMMANDS) == TEXT.count("```bash") > 15
    assert len(BLOCK.findall(TEXT)) * 2 == TEXT.count("```")
    assert any("make train" in command.text for command in COMMANDS)


@pytest.mark.parametrize("page", [README, *ROOT.glob("docs/*.md"), *ROOT.glob("recipes/**/*.md")])
def test_links_lead_somewhere(page: Path) -> None:
    targets = LINK.findall(page.read_text())
    assert not [target for target in targets if not (page.parent / target).exists()]


def test_every_page_is_in_the_index() -> None:
    index = LINK.findall((ROOT / "docs/README.md").read_text())
    assert {page.name for page in ROOT.glob("docs/*.md")} - {"README.md"} <= set(index)


def test_the_readme_is_short_and_lists_every_recipe() -> None:
    text = README.read_text()
    recipes = {path.parent.name for path in ROOT.glob("recipes/*/config.yaml")}
    assert set(re.findall(r"\[`(\w+)`\]\(recipes/\w+/README.md\)", text)) == recipes
    assert len(text.splitlines()) < 200


def test_the_table_of_recipes_counts_their_lines() -> None:
    table = (ROOT / "recipes/README.md").read_text()
    rows = re.findall(r"^\| \[(\w+)\]\(\w+\) .*\| (\d+) \|[^|]*\|[^|]*\|$", table, re.MULTILINE)
    sources = ROOT.glob("recipes/*/__init__.py")
    assert dict(rows) == {
        path.parent.name: str(len(path.read_text().splitlines())) for path in sources
    }
