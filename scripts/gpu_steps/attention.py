"""The attention that hybridrl chooses on this device, and the time of its candidates.

Each computes a packed row forward and backward: once of sequences of one length, once of many
lengths. `packed_flash`, `packed_varlen` and `packed_torch` are those of `model.attention`, as
layers call them. torch's `sdpa_*` take a batch, and so one length only.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from gpu_steps.figures import Figures, Skipped
from gpu_steps.sizes import Sizes, sizes_of
from gpu_steps.steps import Settings
from gpu_steps.timing import median_seconds, seconds
from hybridrl.config import Attention
from hybridrl.models.attention_choice import OBSTACLES, attention_choice
from hybridrl.models.packed_attention import make_packing, packed_attention

Attend = Callable[..., torch.Tensor]
_BACKENDS = {
    "sdpa_flash": SDPBackend.FLASH_ATTENTION,
    "sdpa_efficient": SDPBackend.EFFICIENT_ATTENTION,
    "sdpa_cudnn": SDPBackend.CUDNN_ATTENTION,
}
_NEW_LENGTHS = 5
_DECODE_ROWS, _DECODE_KEYS = 64, 1000


def measure(settings: Settings, figures: Figures) -> None:
    """The choice by format; each candidate's milliseconds; cuDNN at lengths not seen before."""
    device, sizes = torch.device(settings.device), sizes_of(settings)
    torch.backends.cuda.enable_cudnn_sdp(False)  # as `join_group` does
    for dtype in (torch.bfloat16, torch.float32):
        chosen, reason = attention_choice(Attention.auto, device, dtype, sizes.attention)
        figures.add(
            f"attention_choice_{_name(dtype)}",
            chosen.value,
            head_size=sizes.head_size,
            reason=reason or "flash-attn can run",
        )
    for case, lengths in _rows(sizes).items():
        _compare(case, lengths, sizes, device, figures)
    _new_lengths(sizes, device, figures)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _rows(sizes: Sizes) -> dict[str, list[int]]:
    """Ascending lengths of the sequences of a packed row: alike, and all different."""
    alike = [sizes.sequence_tokens] * (sizes.row_tokens // sizes.sequence_tokens)
    shortest = sizes.sequence_tokens // 4
    step = 2 * (sizes.sequence_tokens - shortest) / (len(alike) - 1)
    return {"alike": alike, "mixed": [round(shortest + step * i) for i in range(len(alike))]}


def _compare(
    case: str, lengths: Sequence[int], sizes: Sizes, device: torch.device, figures: Figures
) -> None:
    """Milliseconds of every candidate, and its largest difference from `packed_torch`."""
    dtype = torch.bfloat16
    generator = torch.Generator().manual_seed(0)
    heads, kv_heads = (sizes.shape[f"num_{x}_heads"] for x in ("attention", "key_value"))
    query, key, value = (
        torch.randn(sum(lengths), n, sizes.head_size, generator=generator)
        .to(device, dtype)
        .requires_grad_()
        for n in (heads, kv_heads, kv_heads)
    )
    expected = _packed(lengths, Attention.torch, device)(query, key, value).detach()
    gradient = torch.ones_like(expected)
    for name, make in _candidates(case, lengths, dtype, sizes, device).items():
        try:
            attend = make()

            def both(attend: Attend = attend) -> None:
                attend(query, key, value).backward(gradient)

            difference = (attend(query, key, value) - expected).abs().max().item()
            took = median_seconds(both, device, calls=3)
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            raise
        except (Skipped, RuntimeError) as error:  # torch: no available kernel, say
            figures.skip(f"{name}_{case}", str(error).strip().splitlines()[0])
            continue
        figures.add(
            f"{name}_{case}",
            1e3 * took,
            "ms",
            sequences=len(lengths),
            tokens=sum(lengths),
            difference=difference,
        )


def _candidates(
    case: str, lengths: Sequence[int], dtype: torch.dtype, sizes: Sizes, device: torch.device
) -> dict[str, Callable[[], Attend]]:
    """What makes each of them; it raises Skipped where this machine cannot run it."""

    def packed(kind: Attention) -> Attend:
        of_kind = OBSTACLES.get(kind)
        if of_kind and (obstacle := of_kind(dtype, sizes.attention, device)):
            raise Skipped(obstacle)
        return _packed(lengths, kind, device)

    kinds = (Attention.torch, *OBSTACLES)
    candidates: dict[str, Callable[[], Attend]] = {
        f"packed_{kind.value}": partial(packed, kind) for kind in kinds
    }
    if case == "alike":
        for name, backend in _BACKENDS.items():
            candidates[name] = partial(_sdpa, lengths, backend, device)
    return candidates


def _packed(lengths: Sequence[int], kind: Attention, device: torch.device) -> Attend:
    """hybridrl's attention of a packed row, [tokens, heads, head_dim] in and out."""
    packing, module = make_packing(lengths, kind, device), nn.Module()

    def attend(*row: torch.Tensor) -> torch.Tensor:
        query, key, value = (x.transpose(0, 1)[None] for x in row)
        return packed_attention(module, query, key, value, None, packing=packing)[0][0]

    return attend


def _sdpa(lengths: Sequence[int], backend: SDPBackend, device: torch.device) -> Attend:
    """One of torch's kernels over a batch of sequences of one length."""
    if device.type != "cuda":
        raise Skipped("there is no GPU")

    def attend(*row: torch.Tensor) -> torch.Tensor:
        query, key, value = (x.unflatten(0, (len(lengths), -1)).transpose(1, 2) for x in row)
        shared = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(shared, 1) for x in (key, value))
        with sdpa_kernel(backend):
            out = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return out.transpose(1, 2).flatten(0, 1)

    return attend


def _new_lengths(sizes: Sizes, device: torch.device, figures: Figures) -> None:
    """Milliseconds of a decode step's attention at numbers of keys that it meets first.

    cuDNN plans for each, which is why hybridrl turns it off.
    """
    names = {"new_length_cudnn": True, "new_length_without_cudnn": False}
    if device.type != "cuda":
        for name in names:
            figures.skip(name, "there is no GPU")
        return
    kv_heads = sizes.shape["num_key_value_heads"]
    queries = sizes.shape["num_attention_heads"] // kv_heads
    shape, head = (_DECODE_ROWS, kv_heads), sizes.head_size

    def step(num_keys: int) -> Callable[[], torch.Tensor]:
        drawn = partial(torch.randn, device=device, dtype=torch.bfloat16)
        query = drawn(*shape, queries, head)
        keys, values = drawn(2, *shape, num_keys, head)
        mask = torch.zeros(_DECODE_ROWS, 1, 1, num_keys, device=device, dtype=torch.bfloat16)
        mask = mask.expand(-1, -1, queries, -1)
        return partial(functional.scaled_dot_product_attention, query, keys, values, mask)

    for name, enabled in names.items():
        torch.backends.cuda.enable_cudnn_sdp(enabled)
        first, *later = (step(_DECODE_KEYS + i) for i in range(1 + _NEW_LENGTHS))
        first()
        times = [seconds(attend, device) for attend in later]
        figures.add(name, 1e3 * sorted(times)[_NEW_LENGTHS // 2], "ms", rows=_DECODE_ROWS)
