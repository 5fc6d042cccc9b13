"""Hugging Face decoders made parallel, with packed and paged attention.

Start from `empty_causal_lm` (`load.py`: a module without weights, or a refusal), `StoredWeights`
(`stored_weights.py`: boxes of the weights in files), `model_parameters` (`parallel.py`: a model's
parameters for layouts) and `local_model` (`shard.py`: one rank's shard for generation).
"""
