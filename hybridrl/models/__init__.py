"""Hugging Face decoders made parallel, with packed and paged attention.

Start from `load_causal_lm` (`load.py`: safetensors to a module, or a refusal), `model_parameters`
(`parallel.py`: a model's parameters for layouts) and `local_model` (`shard.py`: one rank's shard
for generation).
"""
