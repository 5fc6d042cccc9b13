"""hybridrl: reinforcement-learning post-training of language models on shared accelerators."""

__version__ = "0.1.0"
