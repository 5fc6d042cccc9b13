"""What tinker-cookbook's recipes need to run offline: a tiny Qwen3 and rows, by the hub's names.

The cookbook picks a renderer by the base model's name, and `datasets` and `transformers` take a
directory of that name for the repository.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

MODEL = "Qwen/Qwen3-8B"
ROWS = 16
PAIRS = 45  # train_dpo saves at every twentieth step


def make_hub(folder: Path) -> None:
    """Write the model and the rows of each recipe below a directory to run the recipes in."""
    _write_model(folder / MODEL)
    questions = [{"question": f"What is {n} + 1?", "answer": f"#### {n % 3}"} for n in range(ROWS)]
    _write_rows(folder / "openai/gsm8k", "main", train=questions)
    talks = [
        {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "a" * n}]}
        for n in range(1, ROWS + 1)
    ]
    _write_rows(folder / "HuggingFaceH4/no_robots", "default", train=talks)
    start = "\n\nHuman: Say yes.\n\nAssistant: "
    pairs = [{"chosen": f"{start}yes{n}", "rejected": f"{start}no{n}"} for n in range(PAIRS)]
    _write_rows(folder / "Anthropic/hh-rlhf", "default", train=pairs, test=pairs[:2])


def _write_model(folder: Path) -> None:
    """Save a model with random weights whose tokens are bytes, turns' ends and boxed answers.

    The boxed answers are there that some of a random model's responses have a reward.
    """
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = Tokenizer(BPE({letter: n for n, letter in enumerate(letters)}, []))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    answers = [AddedToken(f"\\boxed{{{n}}}", special=False, normalized=False) for n in range(3)]
    words.add_tokens(answers)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
    )
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=2048,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)


def _write_rows(folder: Path, name: str, **splits: Sequence[dict[str, object]]) -> None:
    """Write a data set with one configuration, as `datasets` reads a directory's card."""
    folder.mkdir(parents=True)
    files = ""
    for split, rows in splits.items():
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{split}.jsonl").write_text(lines)
        files += f"  - split: {split}\n    path: {split}.jsonl\n"
    card = f"---\nconfigs:\n- config_name: {name}\n  data_files:\n{files}---\n"
    (folder / "README.md").write_text(card)
