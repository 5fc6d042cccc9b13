"""Runs a sandbox: see `worker.py`."""

import sys

from hybridrl.sandbox.worker import main

if __name__ == "__main__":
    main(sys.argv[1:])
