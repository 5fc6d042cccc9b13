"""Seconds of work: operations of a kind on a device, times one scale a kind that a run learns.

Nothing here imports torch.
"""
