"""The README's drawn pictures are what their script draws."""

from pathlib import Path
from xml.etree import ElementTree

from script_modules import load_script

ROOT = Path(__file__).parents[2]


def test_the_pictures_are_those_of_the_script() -> None:
    for name, draw in load_script("pictures.py").PICTURES.items():
        svg = (ROOT / "docs/images" / name).read_text()
        assert svg == draw(), f"python scripts/pictures.py draws {name} anew"
        size = ElementTree.fromstring(svg).attrib["viewBox"].split()
        texts = [node.text for node in ElementTree.fromstring(svg).iter() if node.text]
        assert len(size) == 4
        assert len(texts) > 10
