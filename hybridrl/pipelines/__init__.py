"""Pipeline schedules as data: what is planned is what runs. Imports neither torch nor ray.

Start from `PipelineProblem` (`problem.py`: models, ranks and costs), `evaluate` (`evaluation.py`:
the times of a list of actions) and `search` (`search.py`: the best lists).
"""
