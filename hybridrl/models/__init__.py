"""Hugging Face decoders made parallel, with packed and paged attention.

Start from `load_causal_lm` (`load.py`: safetensors to a module, or a refusal), `model_parameters`
(`parallel.py`: what a layout must know of a model) and `local_model` (`shard.py`: one rank's part
for generation).
"""
