"""A short name for a long TMPDIR: the path of a Unix socket has at most 107 bytes.

Ray, vLLM, multiprocessing and users' code put sockets below TMPDIR. Ray's are the longest:
`hrl12345678/session_2026-01-01_00-00-00_000000_1234567/sockets/plasma_store`.
"""

import logging
import os
import tempfile
from multiprocessing.util import Finalize
from pathlib import Path

from hybridrl.config import ConfigError

logger = logging.getLogger(__name__)

MOST_BYTES = 30
"""The longest TMPDIR below which all sockets have room."""
PLACES = ("/tmp", "/var/tmp", "/dev/shm")
"""Where the short name may be."""


def shorten_tmpdir() -> None:
    """Give this process, and those that it starts, a short name for a TMPDIR that is too long.

    It is a link, so that files are where the user wants them. It goes when the process ends. Raises
    ConfigError, which names TMPDIR, where none of `PLACES` can have it.
    """
    target = os.path.abspath(tempfile.gettempdir())
    if len(os.fsencode(target)) <= MOST_BYTES:
        return
    for place in PLACES:
        try:
            folder = Path(tempfile.mkdtemp(prefix="hrl", dir=place))
            link = folder / "t"
            link.symlink_to(target)
        except OSError:
            continue
        break
    else:
        allowed = (
            f"at most {MOST_BYTES} bytes, since sockets below it have 107 (no place for a link"
        )
        raise ConfigError("TMPDIR", target, f"{allowed} in {', '.join(PLACES)})")
    # After multiprocessing has removed its own folder, which has -100.
    Finalize(None, _remove, args=(link,), exitpriority=-200)
    os.environ["TMPDIR"] = tempfile.tempdir = str(link)
    logger.info("TMPDIR=%s is too long for sockets below it: %s leads there", target, link)


def _remove(link: Path) -> None:
    link.unlink(missing_ok=True)
    link.parent.rmdir()
