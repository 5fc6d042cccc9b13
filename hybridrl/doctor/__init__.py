"""`hybridrl doctor`: what will hurt a run on these machines.

Start from `examine` (`command.py`: brings Ray up with a probe in place of every rank), `Probe`
(`measure.py`: disks, and the links between ranks) and `diagnose` (`checks.py`: facts to findings,
as pure functions).
"""
