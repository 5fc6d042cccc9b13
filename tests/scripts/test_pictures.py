"""The README's drawn pictures are what their script draws."""

import importlib.util
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[2]


def test_the_pictures_are_those_of_the_script() -> None:
    spec = importlib.util.spec_from_file_location("pictures", ROOT / "scripts/pictures.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name, draw in module.PICTURES.items():
        svg = (ROOT / "docs/images" / name).read_text()
        assert svg == draw(), f"python scripts/pictures.py draws {name} anew"
        size = ElementTree.fromstring(svg).attrib["viewBox"].split()
        texts = [node.text for node in ElementTree.fromstring(svg).iter() if node.text]
        assert len(size) == 4
        assert len(texts) > 10
