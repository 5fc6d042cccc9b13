"""The one place that imports verl: its control plane, used by `runtime/`.

Start from `worker_class`, `worker_group` and `subgroup` in `verl.py`.
"""
