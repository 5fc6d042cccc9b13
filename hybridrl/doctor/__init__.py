"""`hybridrl doctor`: finds problems of a run on these nodes.

Start from `examine` (`command.py`: starts Ray with a probe for every rank), `Probe` (`measure.py`:
disks and links) and `diagnose` (`checks.py`: facts to findings, as pure functions).
"""
