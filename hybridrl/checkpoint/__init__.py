"""Checkpoints of a run, and resuming from them.

Start from `save_hf` (`hf.py`: a Hugging Face directory), `save` and `load` (`distributed.py`:
sharded parameters and optimizer state for any topology) and `read` (`folder.py`: a checkpoint
directory and its checksums).
"""
