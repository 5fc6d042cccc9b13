"""The loggers of `telemetry.loggers`: one class each, behind `RunLogger` (`interface.py`).

Start from `RunLoggers` (`run_loggers.py`): all loggers of a run, as `Telemetry` calls them.
"""
