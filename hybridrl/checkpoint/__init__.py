"""What a run saves, and how it resumes from it.

Start from `save_hf` (`hf.py`: a Hugging Face directory), `save` and `load` (`distributed.py`:
sharded parameters and optimizer state for any topology) and `read` (`folder.py`: a checkpoint
directory and its checksums).
"""
