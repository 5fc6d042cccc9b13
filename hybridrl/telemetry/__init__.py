"""The records of a run and the page that shows them. Imports neither torch nor ray.

Start from `Telemetry` (`run.py`: everything that a run writes), `TraceFile` (`trace.py`: the
timeline) and `render` (`report.py`: report.html).
"""
