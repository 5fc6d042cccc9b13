"""Sources of packages that are not installed here, for `make test-contracts`.

    python tests/foreign_sources.py .cache/foreign

Downloads vLLM's GPU build, flash-attn and TRL at their pinned versions. Unpacks what the tests
read: Python files, the C++ that checks flash-attn's arguments, TRL's chat templates. Nothing is
built or installed. What is there already is kept.
"""

import os
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

SCRIPTS = Path(__file__).parents[1] / "scripts"


def pins() -> dict[str, str]:
    """The version of each package that `make` installs on a GPU machine, or measures against."""
    by_file = {"vllm": ("install_vllm.sh", "version"), "flash-attn": ("constraints.txt", None)}
    versions = {}
    for package, (file, variable) in by_file.items():
        line = f"^{variable}=" if variable else f"^{package}=="
        match = re.search(rf"{line}(\S+)$", (SCRIPTS / file).read_text(), re.MULTILINE)
        assert match, f"no pin of {package} in scripts/{file}"
        versions[package] = match[1]
    project = (SCRIPTS.parent / "pyproject.toml").read_text()
    match = re.search(r'"trl==([\d.]+)"', project)
    assert match, "no pin of trl in pyproject.toml"
    return {**versions, "trl": match[1]}


def folder(cache: Path, package: str) -> Path:
    """The folder of a package's sources at its pinned version."""
    return cache / f"{package}-{pins()[package]}"


def download(package: str, version: str, target: Path) -> Path:
    """Have pip download one file into `target`; returns it. Raises CalledProcessError."""
    if package == "flash-attn":  # its source archive; pip asks that for its metadata
        options = ["--no-binary=:all:", "--no-build-isolation"]
    else:
        options = ["--only-binary=:all:", "--platform=manylinux_2_28_x86_64"]
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", f"--dest={target}"]
    environment = {**os.environ, "FLASH_ATTENTION_SKIP_CUDA_BUILD": "TRUE"}
    subprocess.run([*command, *options, f"{package}=={version}"], check=True, env=environment)
    (file,) = target.iterdir()
    return file


def unpack(archive: Path, target: Path) -> None:
    """Unpack what the tests read, without the folder that all of a source archive is in."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            names = [n for n in wheel.namelist() if n.endswith((".py", "METADATA", ".jinja"))]
            wheel.extractall(target, names)
        return
    with tarfile.open(archive) as sources:
        for member in sources.getmembers():
            member.name = member.name.partition("/")[2]
            if re.fullmatch(r"flash_attn/.*\.py|csrc/flash_attn/flash_api\.cpp", member.name):
                sources.extract(member, target, filter="data")


def main(cache: Path) -> None:
    """Fetch what is missing; ends with one line where that fails."""
    cache.mkdir(parents=True, exist_ok=True)
    for package, version in pins().items():
        if folder(cache, package).is_dir():
            continue
        print(f"downloading {package} {version}", file=sys.stderr)
        with tempfile.TemporaryDirectory(dir=cache) as place:
            try:
                archive = download(package, version, Path(place))
            except subprocess.CalledProcessError:
                sys.exit(f"{package}=={version} cannot be downloaded: pip's reason is above")
            unpack(archive, Path(place, "unpacked"))
            Path(place, "unpacked").rename(folder(cache, package))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
