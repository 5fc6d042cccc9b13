"""Seconds of work: operations of a kind on a device, times one scale a kind that a run learns.

Bytes of a rank: what training and generation keep and need, in the phases of a step (`memory.py`).
Nothing here imports torch.
"""
