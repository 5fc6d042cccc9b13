"""Sandboxes: processes in which foreign code runs under limits, and jails for programs.

Start from `pool.py` (who is served, and who is to blame), `process.py` and `worker.py` (the two
sides of a process), and `jail.py` (what confines a program that a model has written).
"""

from hybridrl.sandbox.pool import BusySpan, SandboxPool
from hybridrl.sandbox.process import SandboxProcess, SandboxTask
from hybridrl.sandbox.worker import Service, Settings

__all__ = ["BusySpan", "SandboxPool", "SandboxProcess", "SandboxTask", "Service", "Settings"]
