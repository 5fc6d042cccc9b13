"""Hooks of mkdocs: which files of the repository the site has, and in which order.

Files keep their paths, so a link works in the site as it does in the repository. What a page links
to and is none, such as a script, comes as text; a folder as the list of its files.
"""

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FENCES = re.compile(r"^( *)```.*?^\1```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!\w+:|#)([^)#\s]+)")
ENTRY = re.compile(r"^- \[[^]]*\]\(([\w.]+\.md)\)", re.MULTILINE)


def pages() -> list[Path]:
    """Every page of the site, relative to the repository."""
    files = [ROOT / "README.md", ROOT / "AGENTS.md", *sorted(ROOT.glob("docs/*.md"))]
    files += sorted(ROOT.glob("recipes/*.md")) + sorted(ROOT.glob("recipes/*/*.md"))
    return [file.relative_to(ROOT) for file in files]


def navigation() -> list[dict[str, Any]]:
    """The sections of docs/README.md with their pages, then the recipes."""
    _, *sections = re.split(r"^## ", (ROOT / "docs/README.md").read_text(), flags=re.MULTILINE)
    recipes = [page.as_posix() for page in pages() if page.parts[0] == "recipes"]
    return [
        {"Home": ["README.md", "docs/README.md"]},
        *(
            {section.partition("\n")[0]: [f"docs/{name}" for name in ENTRY.findall(section)]}
            for section in sections
        ),
        {"Recipes": recipes},
        {"Contribute": ["AGENTS.md"]},
    ]


def linked(pages: list[Path]) -> set[Path]:
    """The files and folders that `pages` link to, relative to the repository; those that exist."""
    targets = {
        (ROOT / page.parent / target).resolve()
        for page in pages
        for target in LINK.findall(FENCES.sub("", (ROOT / page).read_text()))
    }
    return {path.relative_to(ROOT) for path in targets if path.exists() and path != ROOT}


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Let a link to a folder lead to the folder's README, where it has one."""
    folder = ROOT / Path(page.file.src_uri).parent

    def to_page(link: re.Match[str]) -> str:
        readme = folder / link[1] / "README.md"
        return f"{link[0].rstrip('/')}/README.md" if readme.is_file() else link[0]

    return LINK.sub(to_page, markdown)


def on_config(config: Any) -> Any:
    """Set the order of the pages; mkdocs calls it first."""
    config.nav = navigation()
    return config


def on_files(files: Any, config: Any) -> Any:
    """Replace the files of docs/ by those of the site, at their places in the repository."""
    from mkdocs.structure.files import File

    for file in list(files):
        if file.src_dir == config.docs_dir:
            files.remove(file)
    for page in pages():
        files.append(File(page.as_posix(), str(ROOT), config.site_dir, config.use_directory_urls))
    for path in sorted(linked(pages()) - set(pages())):
        name = path.as_posix()
        if (ROOT / path / "README.md").is_file():
            continue
        if path.suffix in (".svg", ".png"):
            files.append(File(name, str(ROOT), config.site_dir, False))
            continue
        text = listing(path) if (ROOT / path).is_dir() else (ROOT / path).read_text()
        file = File.generated(config, name, content=text)
        file.dest_uri = file.url = f"{name}.txt"  # which a browser shows
        files.append(file)
    return files


def listing(folder: Path) -> str:
    """The files below `folder`, a line each."""
    files = (path.relative_to(ROOT) for path in sorted((ROOT / folder).rglob("*")))
    return "".join(f"{path}\n" for path in files if "__pycache__" not in path.parts)
