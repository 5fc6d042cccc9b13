"""The functions of `decode_torch` in Triton."""

from hybridrl.kernels.layer_triton import act_mul, qk_norm_rotary_write, residual_norm
from hybridrl.kernels.paged_attention_triton import paged_attention
from hybridrl.kernels.sample_triton import advance, begin_step, sample, uniforms

__all__ = [
    "act_mul",
    "advance",
    "begin_step",
    "paged_attention",
    "qk_norm_rotary_write",
    "residual_norm",
    "sample",
    "uniforms",
]
