"""The engines of a rank: training, generation, scoring.

Start from `TrainEngine` (`train/engine.py`: forward, loss, backward, step), `NativeEngine`
(`rollout/native.py`: continuous batching over a paged KV cache) and `ScoreEngine`
(`score/engine.py`: log-probabilities and scores inside one instance).
"""
