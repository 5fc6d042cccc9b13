"""`python -m gpu_dry.ordinary OUT TEST...`: ordinary tests, and the lines for a GPU they miss."""

from gpu_dry.cuda_lines import LineProbes

probes = LineProbes()
probes.install()  # before the package

import json  # noqa: E402
import sys  # noqa: E402
from pathlib import Path  # noqa: E402

import pytest  # noqa: E402

if __name__ == "__main__":
    out, *tests = sys.argv[1:]
    code = pytest.main(["-q", "-p", "no:cacheprovider", *tests])
    Path(out).write_text(json.dumps(probes.missed()))
    sys.exit(code)
