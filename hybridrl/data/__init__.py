"""Datasets, templates and the stream of prompts.

Start from `load_data` (`load.py`: sources to items), `Item` (`prompts.py`: a prompt's tokens and
its row) and `PromptStream` (`load.py`: the endless order that training reads; by solve rate in
`curriculum.py`).
"""

from hybridrl.data.curriculum import CurriculumStream, prompt_stream
from hybridrl.data.known_rows import KnownRows
from hybridrl.data.load import (
    Data,
    PromptStream,
    load_data,
    load_eval_set,
    mixture_parts,
    task_of,
)
from hybridrl.data.prompts import Item, end_token_id

__all__ = [
    "CurriculumStream",
    "Data",
    "Item",
    "KnownRows",
    "PromptStream",
    "end_token_id",
    "load_data",
    "load_eval_set",
    "mixture_parts",
    "prompt_stream",
    "task_of",
]
