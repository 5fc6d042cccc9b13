"""Which implementation attends the packed rows of training and scoring, and why the others cannot.

On a GPU `auto` takes the first of `OBSTACLES` that can compute the model. Each of these runs
FlashAttention 2, with one call a layer whatever the lengths of the sequences. Where none can, it is
torch's `scaled_dot_product_attention`.
"""

import logging
from collections.abc import Callable, Mapping

import torch

from hybridrl.config import Attention, ConfigError
from hybridrl.models.attention_shape import AttentionShape

logger = logging.getLogger(__name__)

FLASH_DTYPES = (torch.bfloat16, torch.float16)
FLASH_HEAD_SIZES = range(8, 257, 8)
FLASH_CAPABILITY = (8, 0)

Obstacle = Callable[[torch.dtype, AttentionShape, torch.device | None], str | None]
"""Why an implementation cannot attend with heads of a shape in a format on a device; else None.

Without a device only the model is considered, so a driver can ask before ranks exist.
"""


def flash_obstacle(
    dtype: torch.dtype, shape: AttentionShape, device: torch.device | None = None
) -> str | None:
    """Return why flash-attn cannot attend: see `Obstacle`.

    With a device the package is imported: one built for another torch, and flash-attn-4 alone
    (which has the same name and other functions), are there and cannot be used.
    """
    obstacle = _kernel_obstacle(dtype, shape, device)
    return obstacle if obstacle or device is None else flash_import_obstacle()


def flash_import_obstacle() -> str | None:
    """Why flash-attn's function cannot be imported by this process; None where it can be."""
    try:
        from flash_attn import flash_attn_varlen_func  # noqa: F401
    except Exception as error:  # an undefined symbol is an ImportError, a missing driver another
        return f"flash-attn cannot be imported: {' '.join(str(error).split())}"
    return None


def varlen_obstacle(
    dtype: torch.dtype, shape: AttentionShape, device: torch.device | None = None
) -> str | None:
    """Return why `torch.nn.attention.varlen` cannot attend: see `Obstacle`.

    It is the same kernel, as torch's own builds have it, without an argument for a cap.
    """
    if obstacle := _kernel_obstacle(dtype, shape, device):
        return obstacle
    if shape.capped:
        return "varlen_attn has no capped scores"
    if device is not None and not torch.backends.cuda.is_flash_attention_available():
        return "varlen_attn needs FlashAttention, which this torch is built without"
    return None


def _kernel_obstacle(
    dtype: torch.dtype, shape: AttentionShape, device: torch.device | None
) -> str | None:
    """Return what FlashAttention 2 refuses, whoever has built it."""
    if dtype not in FLASH_DTYPES:
        name = str(dtype).removeprefix("torch.")
        return f"FlashAttention computes in bfloat16 and float16, not {name}"
    if shape.head_size not in FLASH_HEAD_SIZES:
        return f"FlashAttention takes heads of 8 to 256 in steps of 8, not {shape.head_size}"
    if shape.sinks:
        return "FlashAttention has no attention sinks"
    if device is None:
        return None
    if device.type != "cuda":
        return "there is no GPU"
    capability = torch.cuda.get_device_capability(device)
    if capability < FLASH_CAPABILITY:
        return "FlashAttention takes GPUs of compute capability 8.0 and above, not {}.{}".format(
            *capability
        )
    return None


OBSTACLES: dict[Attention, Obstacle] = {
    Attention.flash: flash_obstacle,
    Attention.varlen: varlen_obstacle,
}
"""The implementations that have some, in the order in which `auto` asks for them."""


def first_without(obstacles: Mapping[Attention, str | None]) -> tuple[Attention, str]:
    """Return the first implementation without an obstacle, else torch, and what those before have.

    Example: flash-attn that is not installed gives varlen, since "flash-attn cannot be imported".
    """
    reasons: list[str] = []
    for attention, obstacle in obstacles.items():
        if obstacle is None:
            return attention, "; ".join(reasons)
        reasons.append(obstacle)
    return Attention.torch, "; ".join(dict.fromkeys(reasons))


def attention_choice(
    wanted: Attention, device: torch.device, dtype: torch.dtype, shape: AttentionShape
) -> tuple[Attention, str]:
    """Return the implementation to use, and why `auto` takes none that comes before it.

    `dtype` is the format of queries and keys. Raises ConfigError if one is wanted by name that
    cannot run.
    """
    if wanted is Attention.auto:
        return first_without({kind: of(dtype, shape, device) for kind, of in OBSTACLES.items()})
    of_wanted = OBSTACLES.get(wanted)
    if of_wanted and (obstacle := of_wanted(dtype, shape, device)):
        raise ConfigError("model.attention", wanted.value, f"torch or auto here: {obstacle}")
    return wanted, ""


def choose_attention(
    wanted: Attention, device: torch.device, dtype: torch.dtype, shape: AttentionShape
) -> Attention:
    """Return the implementation of `attention_choice`, and log it with its reason."""
    chosen, reason = attention_choice(wanted, device, dtype, shape)
    said = f" ({reason})" if reason and device.type == "cuda" else ""
    logger.info("packed attention on %s: %s%s", device, chosen.value, said)
    return chosen
