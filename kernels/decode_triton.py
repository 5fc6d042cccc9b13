"""The functions of `decode_torch` in Triton."""

from hybridrl.kernels.experts_triton import combine, grouped_product, order_by_expert, route
from hybridrl.kernels.layer_triton import act_mul, qk_norm_rotary_write, residual_norm
from hybridrl.kernels.paged_attention_triton import paged_attention
from hybridrl.kernels.sample_triton import advance, begin_step, sample, uniforms

__all__ = [
    "act_mul",
    "advance",
    "begin_step",
    "combine",
    "grouped_product",
    "order_by_expert",
    "paged_attention",
    "qk_norm_rotary_write",
    "residual_norm",
    "route",
    "sample",
    "uniforms",
]
