"""The surroundings of a dry run: a process group of one rank, models without weights, kernels."""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import peft
import torch
import torch.distributed as dist
import yaml
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import _redistribute
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.nn import functional
from torch.nn.attention import varlen
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_flatten, tree_leaves
from transformers import AutoConfig
from triton.runtime.jit import JITFunction

from gpu_dry.fake_device import ROOT, Counts, FakeDevice
from hybridrl.config import ClusterConfig, Device, TinyModelConfig
from hybridrl.engines.score.shared_memory import SharedMemory
from hybridrl.engines.train import pinned, pipeline_executor
from hybridrl.layout import process_groups
from hybridrl.models import stored_weights
from hybridrl.models.counted_modules import counted_attention
from hybridrl.models.parallel import model_parameters
from hybridrl.models.tiny import make_char_tokenizer
from hybridrl.system.devices import prepare_gpu
from hybridrl.system.rendezvous import join_group
from hybridrl.workers.trainer import ENGINE_GAPS


@contextmanager
def joined(rank: int, size: int, strict: bool) -> Iterator[torch.device]:
    """This process as `rank` of `size` of a group whose other ranks say what this one says."""
    join = dist.init_process_group

    def fake(backend: str, **settings: Any) -> None:
        assert backend == "cpu:gloo,cuda:nccl", backend
        assert torch.are_deterministic_algorithms_enabled() == strict, "NCCL's groups read it"
        join("fake", **settings | {"store": FakeStore()})

    with mock.patch.object(dist, "init_process_group", fake):
        cluster = ClusterConfig(device=Device.cuda)
        device = join_group(rank, size, None, "127.0.0.1", cluster, strict)
        prepare_gpu(device, num_threads=1)
    try:
        with (
            mock.patch.object(process_groups, "_meet", return_value=None),
            mock.patch.object(dist, "all_gather_object", _all_gather_object),
            # The other ranks of the node are no processes; and the weights have no values.
            mock.patch.object(SharedMemory, "create", side_effect=OSError("a dry run")),
            mock.patch.object(dist, "broadcast_object_list", _broadcast_object_list),
            mock.patch.object(pipeline_executor, "dist", _Messages()),
        ):
            yield device
    finally:
        torch.use_deterministic_algorithms(False)
        dist.destroy_process_group()
        # Else DTensors of the next world would name groups of this one.
        _clear_sharding_prop_cache()
        _redistribute._gen_transform_infos.cache_clear()


class _Sent:
    """A message that its receiver has taken at once, as one that waits for it does."""

    def is_completed(self) -> bool:
        return True

    def wait(self) -> bool:
        return True


class _Messages:
    """torch.distributed, whose fake sends would never end."""

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def isend(self, tensor: torch.Tensor, **settings: Any) -> _Sent:
        dist.isend(tensor, **settings)
        return _Sent()


def _all_gather_object(gathered: list[Any], value: Any, group: Any = None) -> None:
    _refuse_device(value)
    gathered[:] = [value] * len(gathered)


def _broadcast_object_list(values: list[Any], **_: Any) -> None:
    """Every rank keeps its own object, and a rank of another stage gets the last one's metrics."""
    _refuse_device(values)
    if isinstance(values[0], tuple) and values[0][0] is None:  # Replica.from_last_stage
        scalar, figures = torch.zeros(()), torch.zeros(len(ENGINE_GAPS), 9)
        tensors, structure = tree_flatten(({"loss": scalar, "weight": scalar}, [figures]))
        shapes = [(tensor.shape, tensor.dtype) for tensor in tensors]
        values[0] = torch.zeros(2 + figures.numel(), dtype=torch.float64), shapes, structure


def _refuse_device(value: Any) -> None:
    """Pickling a tensor on the device reads it, and restores it on the sender's device."""
    for tensor in tree_leaves(value):
        if isinstance(tensor, torch.Tensor) and tensor.device.type == "cuda":
            _Attention.device.sync("pickled")


def write_model(
    folder: Path, name: str, layers: int | None, shape: Mapping[str, Any] | None = None
) -> Path:
    """A directory with the config of `conf/model/NAME.yaml`, cut to `layers`, and a tokenizer.

    Or with that of another `shape`. In it a directory `judge`, with the same as a sequence
    classifier.
    """
    settings = dict(shape or _shape(name)) | ({"num_hidden_layers": layers} if layers else {})
    config = AutoConfig.for_model(
        settings.pop("model_type"), max_position_embeddings=32768, **settings
    )
    path = folder / f"{name}_{config.num_hidden_layers}"
    tokenizer = make_char_tokenizer(TinyModelConfig().alphabet, 32768)
    for folder in (path, path / "judge"):
        config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        config.update({"architectures": ["ForSequenceClassification"], "num_labels": 1})
        config.tie_word_embeddings = False
    return path


def num_layers(name: str) -> int:
    """The layers of the whole model of `conf/model/NAME.yaml`."""
    return int(_shape(name)["num_hidden_layers"])


def _shape(name: str) -> dict[str, Any]:
    return dict(yaml.safe_load((ROOT / f"conf/model/{name}.yaml").read_text())["model"]["shape"])


class _WeightFile:
    """In place of a safetensors file: tensors of a model's shapes without values, on the host."""

    def __init__(self, path: Path, device: FakeDevice) -> None:
        config = AutoConfig.from_pretrained(path.parent)
        classifier = "SequenceClassification" in (config.architectures or [""])[0]
        self.shapes = {p.name: p.shape for p in model_parameters(config, classifier)}
        self._device = device

    def __enter__(self) -> "_WeightFile":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def get_slice(self, name: str) -> "_Slice":
        return _Slice(self.shapes[name], self._device)


class _Slice:
    def __init__(self, shape: tuple[int, ...], device: FakeDevice) -> None:
        self._shape, self._device = shape, device

    def get_shape(self) -> tuple[int, ...]:
        return self._shape

    def get_dtype(self) -> str:
        return "BF16"

    def __getitem__(self, index: tuple[slice, ...]) -> torch.Tensor:
        sizes = [len(range(*i.indices(n))) for i, n in zip(index, self._shape, strict=True)]
        with self._device.fake:
            return torch.empty(sizes, dtype=torch.bfloat16)


class _EmptyTorch:
    """torch, whose zeros are fake."""

    def __init__(self, device: FakeDevice) -> None:
        self._device = device

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def zeros(self, *args: Any, **settings: Any) -> torch.Tensor:
        with self._device.fake:
            return torch.zeros(*args, **settings)


@contextmanager
def mirrors_without_values(device: FakeDevice) -> Iterator[None]:
    """Pinned memory for what leaves the device is fake: it would be as large as the model."""
    with mock.patch.object(pinned, "torch", _EmptyTorch(device)):
        yield


@contextmanager
def weights_without_values(device: FakeDevice) -> Iterator[None]:
    """Models load from a directory without weights: fake tensors in host memory."""

    inject = peft.inject_adapter_in_model

    def adapters_without_values(config: Any, model: Any, name: str) -> Any:
        inject(config, model, name)
        for module in model.modules():
            for leaf, parameter in module.named_parameters(recurse=False):
                if parameter.requires_grad and not isinstance(parameter, FakeTensor):
                    with device.fake:
                        fake = torch.nn.Parameter(torch.empty(parameter.shape))
                    setattr(module, leaf, fake)
        return model

    def names(path: str) -> dict[str, Path]:
        file = Path(path) / "model.safetensors"
        return dict.fromkeys(_WeightFile(file, device).shapes, file)

    with (
        mock.patch.object(peft, "inject_adapter_in_model", adapters_without_values),
        mock.patch.object(stored_weights, "weight_files", names),
        mock.patch.object(stored_weights, "open_file", lambda file: _WeightFile(file, device)),
    ):
        yield


class _Attention(torch.autograd.Function):
    """A fused attention kernel: what it keeps, and how often it runs."""

    device: FakeDevice

    @staticmethod
    def forward(ctx: Any, query: Any, key: Any, value: Any) -> torch.Tensor:
        out: torch.Tensor
        out, lse = counted_attention(query, key, value)  # counts as a kernel
        ctx.save_for_backward(query, key, value, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        named = {"query": query, "key": key, "value": value, "out": out, "lse": lse, "grad": grad}
        _Attention.device.launch("attention_backward", named)
        return tuple(torch.empty_like(x) for x in (query, key, value))


def _sdpa(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
) -> torch.Tensor:
    """torch's attention, with the checks of its fused kernels on CUDA."""
    tensors = [query, key, value, *([] if attn_mask is None else [attn_mask])]
    assert all(x.device.type == "cuda" for x in tensors), "attention on two devices"
    assert len({x.dtype for x in tensors} - {torch.bool}) == 1, "attention in two dtypes"
    assert query.shape[:2] == key.shape[:2] == value.shape[:2], "the kernels repeat no heads"
    if attn_mask is not None:
        assert not is_causal
        attn_mask.expand(*query.shape[:-1], key.shape[-2])
    return _Attention.apply(query, key, value)


def _flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    deterministic: bool = False,
) -> torch.Tensor:
    """flash-attn's function, with the checks of its `mha_varlen_fwd`."""
    _check_variable_length(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    assert softcap >= 0
    assert deterministic == torch.are_deterministic_algorithms_enabled()
    return _Attention.apply(q, k, v)


def _check_variable_length(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    of_queries: torch.Tensor,
    of_keys: torch.Tensor,
    longest_query: int,
    longest_key: int,
) -> None:
    """What FlashAttention 2 refuses in `mha_varlen_fwd`, in flash-attn's sources and in torch's."""
    row = query, key, value
    assert query.dtype in (torch.float16, torch.bfloat16), "only support fp16 and bf16"
    assert query.dtype == key.dtype == value.dtype, "query, key and value must have the same dtype"
    assert all(x.device.type == "cuda" for x in (*row, of_queries, of_keys)), "must be on CUDA"
    assert of_queries.dtype == of_keys.dtype == torch.int32, "must have dtype int32"
    assert of_queries.is_contiguous()
    assert of_keys.is_contiguous()
    assert of_queries.shape == of_keys.shape, "batch_size + 1"
    assert all(x.stride(-1) == 1 for x in row), "must have contiguous last dimension"
    heads, kv_heads, width = query.shape[1], key.shape[1], query.shape[2]
    assert key.shape == value.shape == (key.shape[0], kv_heads, width), "one width, one length"
    assert width % 8 == 0
    assert width <= 256
    assert heads % kv_heads == 0, "heads of keys must divide heads of queries"
    assert longest_query > 0
    assert longest_key > 0


def _checked_varlen_attn() -> Callable[..., Any]:
    """torch's function with the checks of the kernel, which its fake operator leaves out."""
    varlen_attn = varlen.varlen_attn

    @wraps(varlen_attn)
    def checked(*args: Any, **options: Any) -> Any:
        _check_variable_length(*args)
        return varlen_attn(*args, **options)

    return checked


@contextmanager
def _installed(name: str, module: ModuleType | None) -> Iterator[None]:
    """`import name` gives the module, or fails; what is imported meanwhile stays, for classes."""
    before, present = sys.modules.get(name), name in sys.modules
    sys.modules[name] = module  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[name]
        if present:
            sys.modules[name] = before  # type: ignore[assignment]


class _Graph:
    """A CUDA graph: its kernels and collectives, which a replay launches."""

    device: FakeDevice

    def __init__(self) -> None:
        self.captured: Counts | None = None

    @contextmanager
    def capture(self, pool: object = None) -> Iterator[None]:
        assert self.captured is None, "a graph is captured once"
        with self.device.capture() as self.captured:
            yield

    def replay(self) -> None:
        assert self.captured is not None, "nothing was captured"
        self.device.replay(self.captured)


@contextmanager
def kernels(device: FakeDevice, flash: bool) -> Iterator[None]:
    """Kernels that cannot run: attention, Triton's, torch's fused norm. With `flash` flash-attn.

    CUDA graphs note what they would launch.

    DTensor's trial runs for shapes are not counted: they launch nothing.
    """
    _Attention.device = _Graph.device = device

    def launch(function: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        tensors = [x for x in args if isinstance(x, torch.Tensor)]
        assert all(x.device.type == "cuda" for x in tensors), "Triton takes pointers to the device"
        device.launch(function.__name__, dict(zip(function.arg_names, args, strict=False)) | kwargs)

    def rms_norm(x: Any, shape: Any, weight: Any = None, eps: float | None = None) -> torch.Tensor:
        assert weight is None or weight.shape == tuple(shape)
        device.launch("rms_norm", {"x": x, "weight": weight, "out": x})
        return torch.empty_like(x)

    trial = ShardingPropagator._propagate_tensor_meta_non_cached

    def uncounted(*args: Any) -> Any:
        with device.uncounted():  # DTensor asks for the shape of a result, once
            return trial(*args)

    module = ModuleType("flash_attn")
    module.__spec__ = ModuleSpec("flash_attn", None)
    module.flash_attn_varlen_func = _flash_attn_varlen_func
    with (
        _installed("flash_attn", module if flash else None),
        mock.patch.object(functional, "scaled_dot_product_attention", _sdpa),
        mock.patch.object(varlen, "varlen_attn", _checked_varlen_attn()),
        mock.patch.object(functional, "rms_norm", rms_norm),
        mock.patch.object(torch, "rms_norm", rms_norm),
        mock.patch.object(JITFunction, "run", launch),
        mock.patch.object(torch.cuda, "CUDAGraph", _Graph),
        mock.patch.object(torch.cuda, "graph", _Graph.capture),
        mock.patch.object(torch.cuda, "graph_pool_handle", tuple),
        mock.patch.object(ShardingPropagator, "_propagate_tensor_meta_non_cached", uncounted),
    ):
        yield
