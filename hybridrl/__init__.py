"""hybridrl: reinforcement-learning post-training of language models on shared accelerators.

From Python: `hybridrl.train([...])`, `evaluate([...])` and `serve([...])` (`notebook.py`).
"""

from typing import Any

__version__ = "0.1.0"
__all__ = ["ConfigError", "Result", "evaluate", "serve", "train"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from hybridrl import notebook  # seconds, which those who import a part need not pay

    return getattr(notebook, name)
