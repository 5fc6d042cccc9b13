"""GRPO in a plain single-process PyTorch loop, two threads: what a good programmer writes by hand.

Generation: hand-written Qwen3 decoding with fused qkv and gate-up products and a contiguous KV
cache. Prompts are prefilled once per group; rows that have ended leave the batch. Training: the
Hugging Face model on right-padded micro-batches of similar length, the head on response tokens
only.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import torch
from blocks import Blocks
from qwen3_weights import layer_weights
from tasks import CLIP_HIGH, CLIP_LOW, GROUP_SIZE, LEARNING_RATE, THREADS, score, side_arguments
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from hybridrl.data import Item

_COMPACT_AT = 0.8  # remove ended rows once at most this share of the batch is unfinished
_TOKENS_PER_MICRO_BATCH = 8192


@dataclass
class Response:
    """One sampled response: token ids and their log-probabilities."""

    ids: list[int]
    log_probs: list[float]


class Decoder:
    """Qwen3 over left-padded rows with a KV cache [layers, 2, rows, kv_heads, length, head_dim]."""

    def __init__(self, model: PreTrainedModel, length: int) -> None:
        config, body = model.config, model.model
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.dim, self.eps, self.length = config.head_dim, config.rms_norm_eps, length
        self.embed, self.norm, self.head = body.embed_tokens.weight, body.norm.weight, model.lm_head
        self.layers = layer_weights(body)
        cos, sin = body.rotary_emb(self.embed[:1], torch.arange(length)[None])
        self.cos, self.sin = cos[0], sin[0]

    def start(self, padding: torch.Tensor) -> None:
        """An empty cache for rows with `padding` [rows] tokens on their left."""
        rows = len(padding)
        shape = (len(self.layers), 2, rows, self.kv_heads, self.length, self.dim)
        self.cache = torch.zeros(shape)
        self.padding = padding
        hidden = torch.arange(self.length) < padding[:, None]
        self.mask = torch.zeros(rows, 1, 1, self.length).masked_fill_(
            hidden[:, None, None], -torch.inf
        )

    def keep(self, rows: torch.Tensor) -> None:
        """Continue with `rows` only (or with copies of rows)."""
        self.cache = self.cache[:, :, rows]
        self.padding, self.mask = self.padding[rows], self.mask[rows]

    def forward(self, ids: torch.Tensor, start: int) -> torch.Tensor:
        """Logits [rows, vocab] after the last of `ids` [rows, tokens], which begin at `start`."""
        rows, tokens = ids.shape
        stop, dim, kv = start + tokens, self.dim, self.kv_heads
        place = (torch.arange(start, stop) - self.padding[:, None]).clamp_(min=0)
        cos, sin = self.cos[place][:, None], self.sin[place][:, None]
        mask = self.mask[..., :stop]
        if tokens > 1:  # a padded query sees itself, so that its softmax is defined
            causal = torch.ones(tokens, stop, dtype=torch.bool).tril_(start)
            mask = mask.masked_fill(~causal, -torch.inf)
            mask = mask.masked_fill(torch.eye(tokens, stop, dtype=torch.bool), 0.0)

        def rotate(x: torch.Tensor) -> torch.Tensor:
            half = torch.cat((-x[..., dim // 2 :], x[..., : dim // 2]), -1)
            return x * cos + half * sin

        x = functional.embedding(ids, self.embed)
        for w, cache in zip(self.layers, self.cache, strict=True):
            h = functional.rms_norm(x, x.shape[-1:], w["norm1"], self.eps)
            qkv = functional.linear(h, w["qkv"]).view(rows, tokens, -1, dim).transpose(1, 2)
            q, k, v = qkv.split((self.heads, kv, kv), 1)
            q = rotate(functional.rms_norm(q, (dim,), w["q_norm"], self.eps))
            cache[0, :, :, start:stop] = rotate(
                functional.rms_norm(k, (dim,), w["k_norm"], self.eps)
            )
            cache[1, :, :, start:stop] = v
            keys, values = cache[:, :, :, :stop]
            if tokens == 1:  # the query heads of a kv head as its query rows: nothing is repeated
                q = q.reshape(rows, kv, self.heads // kv, dim)
                a = functional.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
                a = a.reshape(rows, 1, self.heads * dim)
            else:
                a = functional.scaled_dot_product_attention(
                    q, keys, values, attn_mask=mask, enable_gqa=True
                )
                a = a.transpose(1, 2).reshape(rows, tokens, self.heads * dim)
            x = x + functional.linear(a, w["out"])
            h = functional.rms_norm(x, x.shape[-1:], w["norm2"], self.eps)
            gate, up = functional.linear(h, w["gate_up"]).chunk(2, -1)
            x = x + functional.linear(functional.silu(gate) * up, w["down"])
        return self.head(functional.rms_norm(x[:, -1], x.shape[-1:], self.norm, self.eps))


@torch.inference_mode()
def generate(
    model: PreTrainedModel, prompts: list[tuple[int, ...]], max_new: int, eos: int
) -> list[Response]:
    """`GROUP_SIZE` responses to each prompt at temperature 1, in the prompts' order."""
    longest = max(map(len, prompts))
    decoder = Decoder(model, longest + max_new)
    padding = torch.tensor([longest - len(prompt) for prompt in prompts])
    decoder.start(padding)
    padded = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
    logits = decoder.forward(padded, 0).repeat_interleave(GROUP_SIZE, 0)
    decoder.keep(torch.arange(len(prompts)).repeat_interleave(GROUP_SIZE))
    rows = torch.arange(len(logits))  # whose responses the batch's rows are
    going = torch.ones(len(rows), dtype=torch.bool)
    tokens = torch.zeros(len(rows), max_new, dtype=torch.int64)
    log_probs = torch.zeros(len(rows), max_new)
    lengths = torch.full((len(rows),), max_new)
    for i in range(max_new):
        log_p = logits.log_softmax(-1)
        noise = torch.empty_like(log_p).exponential_()
        token = (log_p.exp() / noise).argmax(-1, keepdim=True)  # one exact draw a row
        tokens[rows, i] = token[:, 0]
        log_probs[rows, i] = log_p.gather(-1, token)[:, 0]
        ended = going & (token[:, 0] == eos)
        lengths[rows[ended]] = i + 1
        going &= ~ended
        num_going = int(going.sum())
        if not num_going or i + 1 == max_new:
            break
        if num_going <= _COMPACT_AT * len(rows):
            decoder.keep(kept := going.nonzero()[:, 0])
            rows, token, going = rows[kept], token[kept], going[kept]
        logits = decoder.forward(token, longest + i)
    return [
        Response(tokens[r, :n].tolist(), log_probs[r, :n].tolist())
        for r, n in enumerate(lengths.tolist())
    ]


def group_advantages(rewards: list[float]) -> torch.Tensor:
    """(reward - mean) / (standard deviation + 1e-6) within each group [samples]."""
    grouped = torch.tensor(rewards).view(-1, GROUP_SIZE)
    return (
        (grouped - grouped.mean(1, keepdim=True)) / (grouped.std(1, keepdim=True) + 1e-6)
    ).flatten()


def micro_batches(lengths: list[int]) -> Iterator[list[int]]:
    """Samples by length, so many at a time that they stay within the budget when padded."""
    batch: list[int] = []
    for i in sorted(range(len(lengths)), key=lengths.__getitem__):
        if batch and (len(batch) + 1) * lengths[i] > _TOKENS_PER_MICRO_BATCH:
            yield batch
            batch = []
        batch.append(i)
    yield batch


def update(
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    prompts: list[tuple[int, ...]],
    responses: list[Response],
    advantages: torch.Tensor,
) -> None:
    """One step of the clipped surrogate, averaged over all response tokens."""
    sequences = [[*prompts[i // GROUP_SIZE], *response.ids] for i, response in enumerate(responses)]
    num_tokens = sum(len(response.ids) for response in responses)
    for batch in micro_batches([len(sequence) for sequence in sequences]):
        rows = [torch.tensor(sequences[i]) for i in batch]
        # Padding is on the right, where a causal model does not see it: no mask is needed.
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        counts = torch.tensor([len(responses[i].ids) for i in batch])
        ends = torch.tensor([len(row) for row in rows])
        place = torch.arange(ids.shape[1])
        scored = (place >= (ends - counts)[:, None]) & (place < ends[:, None])
        hidden = model.model(ids, use_cache=False).last_hidden_state[:, :-1]
        logits = model.lm_head(hidden[scored[:, 1:]])
        log_probs = logits.log_softmax(-1).gather(-1, ids[scored][:, None])[:, 0]
        old = torch.tensor([x for i in batch for x in responses[i].log_probs])
        advantage = advantages[batch].repeat_interleave(counts)
        ratio = (log_probs - old).exp()
        clipped = ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
        loss = -torch.minimum(ratio * advantage, clipped * advantage).sum() / num_tokens
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def main() -> None:
    """Parse and run blocks of steps."""
    task, model_path = side_arguments(__doc__)
    blocks = Blocks()
    torch.manual_seed(0)
    torch.set_num_threads(THREADS)
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0, fused=True
    )
    stream = task.prompts(model_path)
    going = blocks.begin()
    while going:
        items: list[Item] = list(islice(stream, task.prompts_per_step))
        prompts = [item.prompt_ids for item in items]
        responses = generate(model, prompts, task.max_new_tokens, tokenizer.eos_token_id)
        texts = tokenizer.batch_decode([r.ids for r in responses], skip_special_tokens=True)
        rewards = [score(text, items[i // GROUP_SIZE].answer) for i, text in enumerate(texts)]
        update(model, optimizer, prompts, responses, group_advantages(rewards))
        going = blocks.after_step([len(response.ids) for response in responses])


if __name__ == "__main__":
    main()
