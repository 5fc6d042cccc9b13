"""Which rank holds which part of which parameter, and how weights move between two such layouts.

Start from `Layout` (`layout.py`: boxes by parameter and rank), `plan` (`plan.py`: who sends what)
and `WeightSwitch` (`weight_switch.py`: the plan carried out in buckets).
"""
