"""Tensor parallelism of a Hugging Face model for training, as DTensors, by transformers' own plan.

Activations between the blocks are replicated (Megatron-LM, arXiv 1909.08053, section 3). Every
parameter becomes a DTensor on the tp axis, replicated ones too: the gradient norm and FSDP2 do not
accept a mixture.
"""

from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import Placement
from transformers import PreTrainedModel

from hybridrl.models.expert_parallel import experts_of
from hybridrl.models.image_text import TOWER
from hybridrl.models.parallel import tp_style
from hybridrl.models.stages import modules_after, plain_name


class ReplicatedParameters(ParallelStyle):
    """Replicated parameters, as DTensors; plain activations out.

    `inputs` is the placement of a plain input tensor, `outputs` the placement of the output.
    """

    def __init__(self, inputs: Placement, outputs: Placement) -> None:
        self.inputs, self.outputs = inputs, outputs

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        partition = partial(_distribute_parameters, placement=Replicate())
        enter: Any = self._enter  # torch's type says that hooks give nothing; they may
        return distribute_module(module, device_mesh, partition, enter, self._leave)

    def _enter(self, module: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> Any:
        return tuple(
            x
            if isinstance(x, DTensor)
            else DTensor.from_local(x, mesh, [self.inputs], run_check=False)
            for x in inputs
        )

    def _leave(self, module: nn.Module, outputs: Any, mesh: DeviceMesh) -> Any:
        return outputs.redistribute(placements=[self.outputs]).to_local()


class LocalParameters(ParallelStyle):
    """Replicated parameters as DTensors, which the module's own code sees as plain tensors.

    For a router, and for an image tower: all ranks have the same tokens, or images, so they compute
    the same gradients. Images have many sizes, and for each of them DTensors would work out the
    sharding of every operation anew.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _distribute_parameters("", module, device_mesh, Replicate())
        kept: dict[str, Any] = {}

        def enter(module: nn.Module, _: Any) -> None:
            kept.update(module._parameters)
            module._parameters.update({name: p.to_local() for name, p in kept.items()})

        def leave(module: nn.Module, *_: Any) -> None:
            module._parameters.update(kept)

        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave, always_call=True)
        return module


class HeadWeight(ParallelStyle):
    """A weight of this placement, for a head that is never called: see `linear_log_probs`."""

    def __init__(self, placement: Placement) -> None:
        self.placement = placement

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        partition = partial(_distribute_parameters, placement=self.placement)
        return distribute_module(module, device_mesh, partition)


def _distribute_parameters(name: str, module: nn.Module, mesh: DeviceMesh, placement: Any) -> None:
    for key, parameter in list(module.named_parameters(recurse=False)):
        # src_data_rank None: every rank has loaded the same weights, nothing is sent.
        tensor = distribute_tensor(parameter.data, mesh, [placement], src_data_rank=None)
        module.register_parameter(key, nn.Parameter(tensor, parameter.requires_grad))


def pad_vocabulary(model: PreTrainedModel, multiple: int) -> None:
    """Append rows of zeros to embedding and head until `multiple` divides their number.

    torch's DTensors are only correct for shards of equal size. The rows are never looked up, and
    `linear_log_probs` excludes them.
    """
    head: Any = model.get_output_embeddings()
    embedding = model.get_input_embeddings()
    tied = head is not None and head.weight is embedding.weight
    for module in (embedding, head):
        if module is None:  # a sequence classifier has no head over the vocabulary
            continue
        weight = module.weight
        missing = -len(weight) % multiple
        if missing:
            padded = torch.cat([weight.data, weight.new_zeros(missing, weight.shape[1])])
            module.weight = nn.Parameter(padded, weight.requires_grad)
    bias = None if head is None else head.bias
    if bias is not None and len(bias) < len(head.weight):
        padded = torch.cat([bias.data, bias.new_zeros(len(head.weight) - len(bias))])
        head.bias = nn.Parameter(padded, bias.requires_grad)
    if tied:
        head.weight = embedding.weight


def apply_tensor_parallel(model: PreTrainedModel, mesh: DeviceMesh, sequence: bool) -> None:
    """Make `model`, or a pipeline chunk of one, tensor parallel over the `mesh` of one axis.

    With `sequence`, activations between the blocks are split by tokens (sequence parallelism,
    Korthikanti et al., arXiv 2205.05198, section 4.2.2), whose number tp must divide. Traffic is
    the same, and activations outside of the blocks take 1 / tp of the memory.

    tp must divide heads and widths (`models.parallel.check_train_layout`) and the vocabulary
    (`pad_vocabulary`). The head's forward must not be called afterwards; the head of a sequence
    classifier, `score`, is replicated. Experts are left to `apply_expert_parallel`. Of a pair of
    adapters one is sharded with its weight and the other is replicated
    (`models.adapters.adapter_parameters`).
    """
    head, embedding = cast(Any, model.get_output_embeddings()), model.get_input_embeddings()
    base, last = model.base_model, modules_after(model.config)
    tied = head is not None and embedding is not None and head.weight is embedding.weight
    prefix = f"{model.base_model_prefix}."
    between: Placement = Shard(1) if sequence else Replicate()
    # Gemma 3 normalizes [batch, heads, tokens, dim], Qwen 3 [batch, tokens, heads, dim].
    heads_dim = 1 if model.config.model_type == "gemma3_text" else 2
    # A style for each module that has parameters, and for blocks that gather tokens.
    styles: dict[str, ParallelStyle] = {}
    experts = experts_of(model)
    mixtures = {n.rpartition(".")[0] for n, module in model.named_modules() if module in experts}
    for name, module in model.named_modules():
        whole = name.rpartition(".")[0] in mixtures or name.startswith(TOWER)
        if sequence and name.endswith((".self_attn", ".mlp")):
            styles[name] = _gathering(name, name in mixtures)
        if not list(module.parameters(recurse=False)) or module in experts:
            continue
        layer, _, adapter = plain_name(name).removeprefix(prefix).partition(".lora_")
        match tp_style(model.config, layer), adapter:
            case "colwise", "" | "B":
                styles[name] = ColwiseParallel()
            case "colwise", "A":
                styles[name] = ReplicatedParameters(Replicate(), Replicate())
            case "colwise_gather_output", "" | "B":
                styles[name] = ColwiseParallel(output_layouts=Replicate())
            case "rowwise", "" | "A":
                styles[name] = RowwiseParallel(output_layouts=between)
            case "rowwise_split_input", "" | "A":
                styles[name] = RowwiseParallel(input_layouts=Replicate(), output_layouts=between)
            case "replicated_with_grad_allreduce", _:
                styles[name] = SequenceParallel(sequence_dim=heads_dim, use_local_output=True)
            case _ if whole:
                styles[name] = LocalParameters()
            case _ if module is embedding:
                styles[name] = RowwiseParallel(input_layouts=Replicate(), output_layouts=between)
            case _ if module is head:
                styles[name] = HeadWeight(Shard(0))
            case _ if name == "score":
                styles[name] = HeadWeight(Replicate())
            case _ if any(module is getattr(base, own) for own in last):
                styles[name] = ReplicatedParameters(between, Replicate())
            case _ if name.rpartition(".")[2].startswith("act"):  # between cut layers
                styles[name] = ReplicatedParameters(Shard(-1), Shard(-1))
            case _:
                styles[name] = ReplicatedParameters(between, between)
    trained = {name: p.requires_grad for name, p in model.named_parameters()}
    parallelize_module(model, mesh, styles, src_data_rank=None)
    if tied:  # parallelize_module makes two parameters of it
        head.weight = embedding.weight
    for name, parameter in model.named_parameters():  # torch's SequenceParallel forgets it
        parameter.requires_grad_(trained[name])


def _gathering(name: str, mixture: bool) -> ParallelStyle:
    """All-gathers the tokens before a block, as a DTensor: its gradient is scattered once.

    A mixture of experts gets plain tensors, and gives the same tokens on all ranks.
    """
    if mixture:
        return PrepareModuleInputOutput(
            input_layouts=(Shard(1),),
            desired_input_layouts=(Replicate(),),
            use_local_input=True,
            output_layouts=(Replicate(),),
            desired_output_layouts=(Shard(1),),
        )
    if name.endswith(".mlp"):
        return PrepareModuleInput(
            input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),), use_local_output=False
        )
    return PrepareModuleInput(
        input_kwarg_layouts={"hidden_states": Shard(1)},
        desired_input_kwarg_layouts={"hidden_states": Replicate()},
        use_local_output=False,
    )
