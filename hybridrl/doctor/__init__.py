"""`hybridrl doctor`: finds problems of a run on these machines.

Start from `examine` (`command.py`: starts Ray with a probe in place of every rank), `Probe`
(`measure.py`: disks, and the links between ranks) and `diagnose` (`checks.py`: facts to findings,
as pure functions).
"""
