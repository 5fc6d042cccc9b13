"""Layouts, the boxes of every parameter that each rank holds, and the switch between two of them.

Start from `Layout` (`layout.py`: boxes by parameter and rank), `plan` (`plan.py`: transfers between
ranks) and `WeightSwitch` (`weight_switch.py`: the plan executed in buckets).
"""
