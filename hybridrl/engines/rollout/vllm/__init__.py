"""vLLM in the ranks' own processes: start from `VLLMEngine` in `engine.py`."""
