"""The steps of `scripts/gpu_report.py`, each run in a separate process (`gpu_steps.__main__`).

They import hybridrl from this source tree, installed or not.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

import hybridrl  # noqa: E402

# An installation maps hybridrl.kernels to the folder at the top of the tree.
if str(ROOT) not in hybridrl.__path__:
    hybridrl.__path__.append(str(ROOT))
