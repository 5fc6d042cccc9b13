"""The site of `make docs-site` has every page, in the order of docs/README.md."""

from pathlib import Path

from script_modules import load_script

ROOT = Path(__file__).parents[2]
site = load_script("docs/site.py")


def test_every_page_has_one_place_in_the_navigation() -> None:
    in_order = [
        page for section in site.navigation() for pages in section.values() for page in pages
    ]
    assert sorted(in_order) == sorted(page.as_posix() for page in site.pages())
    assert [next(iter(section)) for section in site.navigation()][:3] == ["Home", "Start", "Write"]
    assert in_order[:4] == ["README.md", "docs/README.md", "docs/start.md", "docs/models.md"]


def test_relative_links_lead_to_files() -> None:
    missing = [
        f"{page}: {target}"
        for page in site.pages()
        for target in site.LINK.findall(site.FENCES.sub("", (ROOT / page).read_text()))
        if not (ROOT / page.parent / target).exists()
    ]
    assert not missing


def test_what_pages_link_to_comes_along() -> None:
    linked = site.linked(site.pages())
    assert Path("scripts/slurm/train.sbatch") in linked
    assert Path("docs/images/architecture.svg") in linked
