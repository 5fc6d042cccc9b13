"""Datasets, templates and the stream of prompts."""

from hybridrl.data.load import Data, PromptStream, load_data
from hybridrl.data.prompts import Item, end_token_id

__all__ = ["Data", "Item", "PromptStream", "end_token_id", "load_data"]
