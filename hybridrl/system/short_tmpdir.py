"""A short name for a long TMPDIR: the path of a Unix socket has at most 107 bytes.

Ray, vLLM, multiprocessing and users' code put sockets below TMPDIR. Ray's are the longest:
`hrl12345678/session_2026-01-01_00-00-00_000000_1234567/sockets/plasma_store`.
"""

import logging
import os
import shutil
import tempfile
from contextlib import ExitStack
from multiprocessing.util import Finalize
from pathlib import Path

from hybridrl.config import ConfigError
from hybridrl.system.owned_folder import owned, remove_abandoned

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
    owner = ExitStack()
    for place in PLACES:
        try:
            remove_abandoned(Path(place), "hrl")
            folder = Path(tempfile.mkdtemp(prefix="hrl", dir=place))
            owner.enter_context(owned(folder))
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
    owner.callback(shutil.rmtree, folder, ignore_errors=True)
    Finalize(None, owner.close, exitpriority=-200)
    os.environ["TMPDIR"] = tempfile.tempdir = str(link)
    logger.info("TMPDIR=%s is too long for sockets below it: %s leads there", target, link)
