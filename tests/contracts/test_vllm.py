"""vLLM's GPU build takes the calls and patches of hybridrl: read from its sources.

Its CPU build runs in `make test-vllm`; only the GPU's wheel has the code of these tests.
"""

import ast
import inspect
import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import Mock

import foreign
import pytest
import torch
from foreign import Sources
from packaging.requirements import Requirement
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hybridrl.engines.rollout.available import SUPPORTED
from hybridrl.engines.rollout.memory import GIB, vllm_batched_tokens
from hybridrl.engines.rollout.vllm.engine import VOCAB_MULTIPLE
from hybridrl.engines.rollout.vllm.groups import _ENVIRONMENT
from hybridrl.engines.rollout.vllm.start import engine_arguments
from hybridrl.layout.mesh import Mesh
from hybridrl.models.parallel import FAMILIES

pytestmark = pytest.mark.contracts

ROOT = Path(__file__).parents[2]
OURS = sorted((ROOT / "hybridrl/engines/rollout/vllm").glob("*.py"))
IMPORTING = [*OURS, ROOT / "scripts/bench/vllm_engine.py"]

ENGINE = "vllm.v1.engine.llm_engine:LLMEngine"
SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
WORKER = "vllm.v1.worker.gpu_worker:Worker"
RUNNER = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
INPUT_BATCH = "vllm.v1.worker.gpu_input_batch:InputBatch"
EXECUTOR = "vllm.v1.executor.uniproc_executor:UniProcExecutor"
CUMEM = "vllm.device_allocator.cumem"
KV_UTILS = "vllm.v1.core.kv_cache_utils"
PARALLEL = "vllm.distributed.parallel_state"

# A call as our file writes it, and what it calls.
CALLS = [
    ("engine.py", "self._sampling.SamplingParams", "vllm.sampling_params:SamplingParams"),
    ("images.py", "tokens_input", "vllm.inputs.engine:tokens_input"),
    ("engine.py", "self._engine.add_request", f"{ENGINE}.add_request"),
    ("engine.py", "self._engine.abort_request", f"{ENGINE}.abort_request"),
    ("engine.py", "self._engine.step", f"{ENGINE}.step"),
    ("steps.py", "scheduler.has_requests", f"{SCHEDULER}.has_requests"),
    ("steps.py", "scheduler.schedule", f"{SCHEDULER}.schedule"),
    ("steps.py", "scheduler.update_from_output", f"{SCHEDULER}.update_from_output"),
    (
        "steps.py",
        "self._core.scheduler.update_from_output",
        f"{SCHEDULER}.update_from_output",
    ),
    ("steps.py", "executor.execute_model", f"{EXECUTOR}.execute_model"),
    ("steps.py", "executor.sample_tokens", f"{EXECUTOR}.sample_tokens"),
    ("engine.py", "self._engine.reset_prefix_cache", f"{ENGINE}.reset_prefix_cache"),
    ("engine.py", "self._core.scheduler.get_request_counts", f"{SCHEDULER}.get_request_counts"),
    ("engine.py", "self._core.scheduler.shutdown", f"{SCHEDULER}.shutdown"),
    ("engine.py", "self._core.model_executor.shutdown", f"{EXECUTOR}.shutdown"),
    (
        "engine.py",
        "self._pool.get_num_free_blocks",
        "vllm.v1.core.block_pool:BlockPool.get_num_free_blocks",
    ),
    ("engine.py", "self._worker.get_model", f"{WORKER}.get_model"),
    ("start.py", "LLMEngine.from_engine_args", f"{ENGINE}.from_engine_args"),
    (
        "start.py",
        "model.make_empty_intermediate_tensors",
        "vllm.model_executor.models.utils:make_empty_intermediate_tensors_factory"
        ".make_empty_intermediate_tensors",
    ),
    (
        "groups.py",
        "parallel_state.model_parallel_is_initialized",
        f"{PARALLEL}:model_parallel_is_initialized",
    ),
    (
        "groups.py",
        "parallel_state.destroy_model_parallel",
        f"{PARALLEL}:destroy_model_parallel",
    ),
    ("groups.py", "envs.disable_envs_cache", "vllm.envs:disable_envs_cache"),
    ("sampling.py", "get_tp_group", f"{PARALLEL}:get_tp_group"),
    ("sampling.py", "group.broadcast", f"{PARALLEL}:GroupCoordinator.broadcast"),
    ("memory.py", "get_world_group", f"{PARALLEL}:get_world_group"),
    ("memory.py", "kv_cache_utils.replace_as", "vllm.v1.kv_cache_interface:replace_as"),
    ("memory.py", "self._worker.sleep", f"{WORKER}.sleep"),
    ("memory.py", "self._worker.wake_up", f"{WORKER}.wake_up"),
    ("memory.py", "CuMemAllocator.get_instance", f"{CUMEM}:CuMemAllocator.get_instance"),
    ("memory.py", "CuMemAllocator.get_instance().discard", f"{CUMEM}:CuMemAllocator.discard"),
    (
        "weights.py",
        "method.process_weights_after_loading",
        "vllm.model_executor.layers.linear:UnquantizedLinearMethod.process_weights_after_loading",
    ),
    (
        "weights.py",
        "method.moe_kernel.fused_experts.process_weights_after_loading",
        "vllm.model_executor.layers.fused_moe.modular_kernel:FusedMoEExperts"
        ".process_weights_after_loading",
    ),
    (
        "names.py",
        "mapper.get_rename_mapper",
        "vllm.model_executor.models.utils:WeightsMapper.get_rename_mapper",
    ),
    (
        "names.py",
        "mapper.get_rename_mapper().apply_list",
        "vllm.model_executor.models.utils:WeightsMapper.apply_list",
    ),
]

# What we read or replace of vLLM's objects.
ATTRIBUTES = {
    ENGINE: {"engine_core", "vllm_config"},
    "vllm.v1.engine.core_client:InprocClient": {"engine_core"},
    "vllm.v1.engine.core:EngineCore": {"step_fn", "scheduler", "model_executor"},
    SCHEDULER: {"kv_cache_manager", "requests"},
    "vllm.v1.core.kv_cache_manager:KVCacheManager": {"block_pool"},
    "vllm.v1.core.block_pool:BlockPool": {"num_gpu_blocks"},
    EXECUTOR: {"driver_worker"},
    "vllm.v1.worker.worker_base:WorkerWrapperBase": {"worker"},
    WORKER: {"model_runner", "use_v2_model_runner"},
    RUNNER: {"kv_caches", "intermediate_tensors", "max_num_tokens", "input_batch"},
    INPUT_BATCH: {
        "num_tokens_no_spec", "num_prompt_tokens", "logitsprocs",
        "logitsprocs_need_output_token_ids",
    },
    "vllm.v1.sample.logits_processor.state:LogitsProcessors": {"non_argmax_invariant"},
    "vllm.v1.core.sched.output:SchedulerOutput": {"total_num_scheduled_tokens"},
    "vllm.v1.engine:EngineCoreOutputs": {"outputs"},
    "vllm.v1.request:Request": {"num_preemptions"},
    f"{PARALLEL}:GroupCoordinator": {
        "rank_in_group", "world_size", "cpu_group", "device_communicator",
    },
    "vllm.outputs:RequestOutput": {"request_id", "outputs", "finished", "num_cached_tokens"},
    "vllm.outputs:CompletionOutput": {"token_ids", "finish_reason"},
    "vllm.v1.sample.logits_processor.interface:BatchUpdate": {"removed", "added", "moved"},
    "vllm.config.vllm:VllmConfig": {"scheduler_config"},
    "vllm.config.scheduler:SchedulerConfig": {"max_num_seqs", "async_scheduling"},
}  # fmt: skip


def test_the_pin_is_the_version_that_is_checked(vllm: Sources) -> None:
    """vLLM runs on the torch that is pinned."""
    (metadata,) = vllm.root.glob("vllm-*.dist-info/METADATA")
    lines = metadata.read_text().splitlines()
    (version,) = (line.split()[1] for line in lines if line.startswith("Version: "))
    assert version.split(".")[:2] == SUPPORTED.split(".")
    (torch_wanted,) = (
        Requirement(line.partition(": ")[2])
        for line in lines
        if line.startswith("Requires-Dist: torch=")
    )
    assert f"{torch_wanted}\n" in (ROOT / "scripts/constraints.txt").read_text()


def test_models_of_transformers_are_made_by_the_call_that_we_replace(vllm: Sources) -> None:
    """`give_own_classes`: vLLM shall not rewrite the classes that the rank trains with."""
    path = vllm.root / "vllm/model_executor/models/transformers/base.py"
    names = {
        ast.unparse(node)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "AutoModel"
    }
    assert names == {"AutoModel.from_config"}


def _imports() -> Iterator[tuple[str, str]]:
    for file in IMPORTING:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
                yield from ((node.module or "", alias.name) for alias in node.names)


IMPORTS = sorted(set(_imports()))


def test_imports_are_read() -> None:
    assert ("vllm", "EngineArgs") in IMPORTS
    assert len(IMPORTS) > 10


@pytest.mark.parametrize(("module", "name"), IMPORTS, ids=".".join)
def test_a_name_that_we_import_exists(vllm: Sources, module: str, name: str) -> None:
    if module == "vllm":  # it imports its names when they are asked for
        places = ast.literal_eval(vllm.value("vllm", "MODULE_ATTRS"))
        if name in places:
            module = f"vllm{places[name].partition(':')[0]}"
    assert vllm.has(module, name)


@pytest.mark.parametrize(("file", "call", "where"), CALLS, ids=lambda value: value)
def test_a_call_of_ours_binds(vllm: Sources, file: str, call: str, where: str) -> None:
    calls = foreign.calls_of(ast.parse((OURS[0].parent / file).read_text()), call)
    assert calls, f"{file} no longer calls {call}"
    for node in calls:
        foreign.bind(vllm.signature(where), node)


@pytest.mark.parametrize("where", ATTRIBUTES)
def test_attributes_that_we_use_exist(vllm: Sources, where: str) -> None:
    assert ATTRIBUTES[where] <= vllm.attributes(where)


# The engine's arguments


def _arguments(pp: int = 1) -> dict[str, Any]:
    mesh = Mesh((("instance", 1), ("pp", pp), ("tp", 2)))
    return engine_arguments(
        "model",
        mesh,
        dtype=torch.bfloat16,
        device=torch.device("cuda"),
        max_running=4,
        block_size=16,
        kv_cache_tokens=64,
        max_sequence=32,
        bytes_per_token=8,
        gpu_memory_utilization=0.5,
        sampler=type,
    )


def test_engine_arguments_exist_and_take_our_values(vllm: Sources) -> None:
    arguments = _arguments()
    assert arguments.keys() <= set(vllm.fields("vllm.engine.arg_utils:EngineArgs"))
    literals = {
        "load_format": ("vllm.model_executor.model_loader", "LoadFormats"),
        "distributed_executor_backend": ("vllm.config.parallel", "DistributedExecutorBackend"),
        "dtype": ("vllm.config.model", "ModelDType"),
        "moe_backend": ("vllm.config.kernel", "MoEBackend"),
    }
    for key, (module, name) in literals.items():
        assert arguments[key] in vllm.literal(module, name), key


def test_the_head_accumulates_in_float32(vllm: Sources) -> None:
    """`head_dtype` in the Hugging Face config is read, by the layer that computes logits."""
    head_dtype = vllm.load(
        "vllm.config.model:_get_head_dtype",
        torch=torch,
        _STR_DTYPE_TO_TORCH_DTYPE={"float32": torch.float32},
    )
    config = SimpleNamespace(**_arguments()["hf_overrides"])
    assert head_dtype(config, torch.bfloat16, "generate") is torch.float32
    layer = "vllm.model_executor.layers.logits_processor:LogitsProcessor"
    assert "head_dtype" in vllm.attributes(layer)
    mm = Mock()
    project = vllm.load(
        f"{layer}._apply_head",
        torch=SimpleNamespace(float32=torch.float32, mm=mm),
        current_platform=SimpleNamespace(is_cuda=lambda: True, is_rocm=lambda: False),
        UnquantizedEmbeddingMethod=Mock,
        UnquantizedLinearMethod=Mock,
    )
    hidden = Mock(dtype=torch.bfloat16, is_cuda=True, shape=(2, 4))
    project(SimpleNamespace(head_dtype=torch.float32), Mock(quant_method=Mock()), hidden, None)
    assert mm.call_args.kwargs == {"out_dtype": torch.float32}


def test_a_logits_processor_selects_the_runner_that_we_know(vllm: Sources) -> None:
    """The V2 runner has no logits processors."""
    unsupported = vllm.load(
        "vllm.config.vllm:VllmConfig._get_v2_model_runner_unsupported_features",
        CompilationMode=SimpleNamespace(STOCK_TORCH_COMPILE="stock"),
    )
    parallel = SimpleNamespace(
        tensor_parallel_size=2,
        pipeline_parallel_size=1,
        distributed_executor_backend="external_launcher",
        use_ubatching=False,
        enable_elastic_ep=False,
    )
    config = SimpleNamespace(
        model_config=SimpleNamespace(logits_processors=[]),
        speculative_config=None,
        compilation_config=SimpleNamespace(
            mode="none", pass_config=SimpleNamespace(enable_sp=False)
        ),
        parallel_config=parallel,
        cache_config=SimpleNamespace(mamba_cache_mode="none"),
    )
    assert unsupported(config) == []
    config.model_config.logits_processors = _arguments()["logits_processors"]
    assert unsupported(config) == ["custom logits processors"]


def test_guesses_exclude_our_sampler(vllm: Sources) -> None:
    """So `rollout.speculate` is refused: see docs/vllm.md."""
    build = vllm.load(
        "vllm.v1.sample.logits_processor:build_logitsprocs",
        STR_SPEC_DEC_REJECTS_LOGITSPROCS="no custom logits processors",
    )
    config = SimpleNamespace(speculative_config=SimpleNamespace(method="ngram"))
    with pytest.raises(ValueError, match="no custom logits processors"):
        build(config, "cpu", False, False, _arguments()["logits_processors"])


def test_our_sampler_is_a_whole_logits_processor(vllm: Sources) -> None:
    """It has every abstract method, with vLLM's parameters."""
    sampling = ast.parse((OURS[0].parent / "sampling.py").read_text())
    (ours,) = (
        node
        for node in sampling.body
        if isinstance(node, ast.ClassDef) and node.name == "StreamSampler"
    )
    parameters = {
        method.name: [arg.arg for arg in method.args.args]
        for method in ours.body
        if isinstance(method, ast.FunctionDef)
    }
    where = "vllm.v1.sample.logits_processor.interface:LogitsProcessor"
    base = vllm.find(where)
    abstract = [
        method
        for method in base.body
        if isinstance(method, ast.FunctionDef)
        and "abstractmethod" in map(ast.unparse, method.decorator_list)
    ]
    assert {"__init__", "apply", "update_state"} <= {method.name for method in abstract}
    for method in abstract:
        assert parameters[method.name] == [arg.arg for arg in method.args.args]


@pytest.mark.parametrize(
    ("memory", "tokens"), [(79 * GIB, 16384), (70 * GIB, 16384), (45 * GIB, 8192)]
)
def test_a_step_has_the_tokens_of_its_offline_engine(
    vllm: Sources, monkeypatch: pytest.MonkeyPatch, memory: int, tokens: int
) -> None:
    """An engine that is made as ours is would have 2,048."""
    contexts = SimpleNamespace(LLM_CLASS="offline", OPENAI_API_SERVER="server")
    for package in ("vllm", "vllm.usage"):
        monkeypatch.setitem(sys.modules, package, ModuleType(package))
    module = SimpleNamespace(UsageContext=contexts)
    monkeypatch.setitem(sys.modules, "vllm.usage.usage_lib", module)
    platform = SimpleNamespace(
        get_device_total_memory=lambda: memory,
        get_device_name=lambda: "NVIDIA GPU",
        is_tpu=lambda: False,
        is_cpu=lambda: False,
    )
    defaults = vllm.load(
        "vllm.engine.arg_utils:EngineArgs.get_batch_defaults",
        classmethod=lambda function: function,
        current_platform=platform,
        GiB_bytes=GIB,
    )
    by_context, _ = defaults(None, 1)
    assert by_context["offline"] == vllm_batched_tokens(memory) == tokens
    ours = ast.unparse(vllm.find(f"{ENGINE}.from_engine_args"))
    assert "usage_context: UsageContext=UsageContext.ENGINE_CONTEXT" in ours
    assert "ENGINE_CONTEXT" not in ast.unparse(
        vllm.find("vllm.engine.arg_utils:EngineArgs.get_batch_defaults")
    )
    config = vllm.find("vllm.config.scheduler:SchedulerConfig")
    assert "DEFAULT_MAX_NUM_BATCHED_TOKENS: ClassVar[int] = 2048" in ast.unparse(config)


# Steps


def test_our_executor_schedules_asynchronously(vllm: Sources) -> None:
    """With results that are read later."""
    supports = vllm.load(f"{EXECUTOR}.supports_async_scheduling", classmethod=lambda f: f)
    assert supports(None) is True
    ours = vllm.find("vllm.v1.executor.uniproc_executor:ExecutorWithExternalLauncher")
    assert [ast.unparse(base) for base in ours.bases] == ["UniProcExecutor"]
    names = {node.name for node in ours.body if isinstance(node, ast.FunctionDef)}
    assert not names & {"collective_rpc", "execute_model", "sample_tokens"}


def test_a_batch_is_read_once_its_draws_are_on_the_host(vllm: Sources) -> None:
    """Our copy is queued before vLLM's, whose end it waits for: with either kind of scheduling."""
    output = "vllm.v1.worker.gpu_model_runner:AsyncGPUModelRunnerOutput"
    begun = ast.unparse(vllm.find(f"{output}.__init__"))
    assert "async_output_copy_stream.wait_stream(default_stream)" in begun
    assert begun.index("wait_stream") < begun.index("self.async_copy_ready_event.record()")
    read = ast.unparse(vllm.find(f"{output}.get_output"))
    assert "self.async_copy_ready_event.synchronize()" in read
    plain = ast.unparse(vllm.find(f"{RUNNER}._to_list"))
    assert "self.transfer_event.synchronize()" in plain
    sampled = ast.unparse(vllm.find(f"{RUNNER}.sample_tokens"))
    assert sampled.index("self._sample(") < sampled.index("AsyncGPUModelRunnerOutput(")


def test_placeholders_count_as_tokens(vllm: Sources) -> None:
    """A draw's number follows from the placeholders, also while a step is not read yet."""
    source = ast.unparse(vllm.find(f"{RUNNER}._bookkeeping_sync"))
    assert "sampled_ids = [-1]" in source
    assert "self.input_batch.num_tokens_no_spec[req_idx] = end_idx" in source
    added = ast.unparse(vllm.find(f"{INPUT_BATCH}.add_request"))
    assert "self.num_tokens_no_spec[req_index] = request.num_tokens" in added


def test_tokens_stay_on_the_device_where_nothing_reads_them(vllm: Sources) -> None:
    """vLLM brings them to the host before each draw, unless this is off."""
    update = vllm.load(f"{INPUT_BATCH}.update_async_output_token_ids")
    update(SimpleNamespace(sampling_metadata=SimpleNamespace(output_token_ids=[]),
                           sampled_token_ids_cpu=object()))  # fmt: skip
    source = ast.unparse(vllm.find(f"{INPUT_BATCH}._make_sampling_metadata"))
    assert "or self.logitsprocs_need_output_token_ids" in source


def test_a_request_is_not_scheduled_behind_its_last_token(vllm: Sources) -> None:
    """A request that was preempted waits for the token of a step that is not read yet."""
    source = ast.unparse(vllm.find(f"{SCHEDULER}.schedule"))
    assert "request.num_prompt_tokens + request.max_tokens" in source
    assert "request.num_stale_output_tokens > 0 and (not request.drop_stale_output)" in source


def test_an_added_request_has_its_parameters_and_tokens(vllm: Sources) -> None:
    """We unpack (index, parameters, prompt, tokens so far)."""
    added = vllm.value("vllm.v1.sample.logits_processor.interface", "AddedRequest")
    assert ast.unparse(added) == "tuple[int, SamplingParams, list[int] | None, list[int]]"


# Process groups and devices


def test_a_rank_and_its_gpu_are_told_by_the_environment(
    vllm: Sources, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = vllm.load(
        "vllm.v1.executor.uniproc_executor:ExecutorWithExternalLauncher._distributed_args", os=os
    )
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert arguments(None) == ("env://", 5, 1)


@pytest.mark.parametrize("name", [*_ENVIRONMENT, "VLLM_PP_LAYER_PARTITION"])
def test_variables_that_we_set_are_read(vllm: Sources, name: str) -> None:
    table = vllm.value("vllm.envs", "environment_variables")
    assert isinstance(table, ast.Dict)
    assert name in {key.value for key in table.keys if isinstance(key, ast.Constant)}


def test_groups_are_made_by_the_function_that_we_replace(vllm: Sources) -> None:
    """By its name in the module, with the ranks first and without the queue where we say so."""
    where = f"{PARALLEL}:init_model_parallel_group"
    parameters = list(vllm.signature(where).parameters)
    assert parameters[0] == "group_ranks"
    assert "use_message_queue_broadcaster" in parameters
    calls = foreign.calls_of(
        vllm.find(f"{PARALLEL}:initialize_model_parallel"), "init_model_parallel_group"
    )
    names = {
        word.value.value
        for call in calls
        for word in call.keywords
        if word.arg == "group_name" and isinstance(word.value, ast.Constant)
    }
    assert {"tp", "pp"} <= names
    for call in calls:
        assert call.args, "the ranks by keyword"
        foreign.bind(vllm.signature(where), call)


NVML = {"GPU-a": 4, "GPU-b": 6}
"""Physical numbers of GPUs by their UUIDs."""


@pytest.fixture
def platform(vllm: Sources) -> Any:
    """vLLM's arithmetic of devices on NVIDIA's GPUs, with a forged NVML."""
    interface = "vllm.platforms.interface:Platform"
    names = (
        "device_id_to_physical_device_id",
        "logical_device_id_to_visible_device_id",
        "visible_device_id_to_physical_device_id",
    )
    loaded = {
        name: vllm.load(f"{interface}.{name}", os=os, _assigned_physical_gpu_ids=None)
        for name in names
    }
    pynvml = SimpleNamespace(nvmlDeviceGetHandleByUUID=NVML.get, nvmlDeviceGetIndex=int)
    module = "vllm.platforms.cuda:NvmlCudaPlatform"
    loaded["device_control_id_to_physical_device_id"] = vllm.load(
        f"{module}.device_control_id_to_physical_device_id",
        pynvml=pynvml,
        cache=lambda function: function,
        with_nvml_context=lambda function: function,
    )
    return type("Platform", (), {"device_control_env_var": "CUDA_VISIBLE_DEVICES", **loaded})


@pytest.mark.parametrize(
    ("visible", "ordinals"),
    [
        ("0,1,2,3,4,5,6,7", [0, 1, 2]),
        ("6,7", [0, 1]),
        ("7,6", [0, 1]),
        ("GPU-b,GPU-a", [0, 1]),
        (None, [0, 1, 2]),
    ],
)
def test_a_rank_that_sees_all_gpus_finds_its_peers(
    platform: Any, monkeypatch: pytest.MonkeyPatch, visible: str | None, ordinals: list[int]
) -> None:
    """vLLM's number of a GPU is our LOCAL_RANK: an index into CUDA_VISIBLE_DEVICES."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    reached = [platform.logical_device_id_to_visible_device_id(index) for index in ordinals]
    assert reached == ordinals


def _peer_check(vllm: Sources, platform: Any, skip: bool) -> Any:
    def access(source: int, target: int) -> bool:
        places = map(platform.logical_device_id_to_visible_device_id, (source, target))
        return len(set(places)) == 2

    return vllm.load(
        "vllm.distributed.device_communicators.custom_all_reduce:_can_p2p",
        envs=SimpleNamespace(VLLM_SKIP_P2P_CHECK=skip),
        logger=SimpleNamespace(debug=lambda *_: None),
        torch=SimpleNamespace(cuda=SimpleNamespace(can_device_access_peer=lambda a, b: a != b)),
        current_platform=platform,
        gpu_p2p_access_check=access,
    )


@pytest.mark.parametrize("skip", [True, False])
def test_custom_all_reduce_needs_all_gpus_visible(
    vllm: Sources, platform: Any, monkeypatch: pytest.MonkeyPatch, skip: bool
) -> None:
    """Why ranks under Ray see every GPU of their node: with their own alone vLLM does not start."""
    can_p2p = _peer_check(vllm, platform, skip)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,7")
    assert can_p2p(0, 2)
    assert can_p2p(1, 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    with pytest.raises(IndexError):
        can_p2p(0, 2)


# Sleep and wake


@dataclass
class Allocation:
    """As `AllocationData`, of `vllm.device_allocator`."""

    handle: tuple[int, int, int, int]
    tag: str
    cpu_backup_tensor: torch.Tensor | None = None
    is_asleep: bool = False


class Pool:
    """vLLM's allocator with forged calls of the driver, which are noted in `log`."""

    def __init__(self, vllm: Sources) -> None:
        self.log: list[str] = []
        note = self.log.append

        @contextmanager
        def pool(*_: Any) -> Iterator[tuple[Any, None]]:
            note("pool")
            yield SimpleNamespace(snapshot=list), None

        memory = SimpleNamespace(_set_allocator_settings=note)
        cuda = SimpleNamespace(empty_cache=lambda: note("empty cache"), memory=memory)
        accelerator = SimpleNamespace(
            empty_cache=lambda: note("empty cache"), synchronize=lambda *_: None
        )
        allocator = vllm.load(
            f"{CUMEM}:CuMemAllocator",
            torch=SimpleNamespace(
                cuda=cuda, accelerator=accelerator, empty=torch.empty, uint8=torch.uint8
            ),
            PIN_MEMORY=False,
            libcudart=SimpleNamespace(cudaMemcpy=lambda *_: note("copy")),
            create_and_map=lambda handle: note(f"map {handle[2]}"),
            unmap_and_release=lambda handle: note(f"unmap {handle[2]}"),
            logger=SimpleNamespace(info=lambda *_: None, warning=lambda text: note("conflict")),
            gc=SimpleNamespace(collect=lambda: None),
            os=os,
            contextmanager=contextmanager,
            use_memory_pool_with_allocator=pool,
        )
        self.allocator = allocator()
        self.allocator.pointer_to_data = {
            1: Allocation((0, 8, 1, 0), "weights"),
            2: Allocation((0, 8, 2, 0), "kv_cache"),
        }

    def logged(self) -> list[str]:
        """The calls since the last look."""
        calls, self.log[:] = list(self.log), []
        return calls


@pytest.fixture
def pool(vllm: Sources) -> Pool:
    return Pool(vllm)


def test_the_allocations_of_vllm_have_these_fields(vllm: Sources) -> None:
    fields = vllm.fields("vllm.device_allocator:AllocationData")
    assert fields == list(inspect.signature(Allocation).parameters)


def test_sleep_passes_over_what_sleeps(pool: Pool) -> None:
    """A cache that was freed before; a second sleep frees nothing."""
    pool.allocator.discard(("kv_cache",))
    assert pool.logged() == ["unmap 2"]
    pool.allocator.sleep(offload_tags=())
    assert pool.logged() == ["unmap 1", "empty cache"]
    pool.allocator.sleep(offload_tags=())
    assert pool.logged() == ["empty cache"]


def test_wake_empties_torchs_cache_before_it_maps(pool: Pool) -> None:
    """So what training has freed is there to be mapped; each tag by itself, without a copy."""
    pool.allocator.sleep(offload_tags=())
    pool.logged()
    pool.allocator.wake_up(["weights"])
    assert pool.logged() == ["empty cache", "map 1"]
    pool.allocator.wake_up(["kv_cache"])
    assert pool.logged() == ["empty cache", "map 2"]
    pool.allocator.wake_up(["kv_cache"])
    assert pool.logged() == ["empty cache"]


def test_level_2_copies_nothing(vllm: Sources, monkeypatch: pytest.MonkeyPatch) -> None:
    """Level 1 copies the weights."""
    offloaded: list[Any] = []
    allocator = SimpleNamespace(sleep=lambda offload_tags: offloaded.append(offload_tags))
    module = SimpleNamespace(get_mem_allocator_instance=lambda: allocator)
    monkeypatch.setitem(sys.modules, "vllm.device_allocator", module)
    suspend = vllm.load("vllm.device_allocator.sleep_mode_backend:CuMemBackend.suspend")
    for level in (2, 1):
        suspend(SimpleNamespace(), level)
    assert offloaded == [(), ("weights",)]


@pytest.mark.parametrize(
    ("settings", "calls"),
    [
        ("expandable_segments:True", ["expandable_segments:False", "pool",
                                      "expandable_segments:True"]),
        ("", ["pool"]),
    ],
)  # fmt: skip
def test_expandable_segments_are_off_around_its_pool(
    pool: Pool, monkeypatch: pytest.MonkeyPatch, settings: str, calls: list[str]
) -> None:
    """By the old variable alone: so we set that one from the new one."""
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", settings)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    with pool.allocator.use_memory_pool("weights"):
        pass
    assert pool.logged() == calls


def test_a_level_2_worker_restores_its_buffers(vllm: Sources) -> None:
    """Rotary tables are no parameters: nothing else would fill them."""
    sleep, wake = (ast.unparse(vllm.find(f"{WORKER}.{name}")) for name in ("sleep", "wake_up"))
    assert "self._sleep_saved_buffers = {" in sleep
    assert "buffer.data.copy_(self._sleep_saved_buffers[name].data)" in wake


@pytest.mark.parametrize(
    "where",
    [
        "vllm.model_executor.layers.linear:UnquantizedLinearMethod",
        "vllm.model_executor.layers.vocab_parallel_embedding:UnquantizedEmbeddingMethod",
    ],
)
def test_weights_written_in_place_stay_as_they_are(vllm: Sources, where: str) -> None:
    """On NVIDIA's GPUs nothing is packed after loading: captured graphs read what we wrote."""
    platform = SimpleNamespace(
        is_cpu=lambda: False,
        is_xpu=lambda: False,
        is_rocm=lambda: False,
        is_cuda=lambda: True,
        is_cuda_alike=lambda: True,
    )
    process = vllm.load(f"{where}.process_weights_after_loading", current_platform=platform)
    process(None, object())  # which has no attribute to be read or set


FUSED = {
    "qkv_proj": ["q_proj", "k_proj", "v_proj"],
    "gate_up_proj": ["gate_proj", "up_proj"],
}
"""What vLLM keeps as rows of one tensor; the weight switch writes them there."""


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_fuses_the_tensors_that_we_write(vllm: Sources, family: str) -> None:
    """In this order of rows. And its model runs in pipeline stages."""
    table = ast.literal_eval(
        vllm.value("vllm.model_executor.models.registry", "_TEXT_GENERATION_MODELS")
    )
    file, name = table[MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family]]
    node = vllm.find(f"vllm.model_executor.models.{file}:{name}")
    bases = {ast.unparse(base) for base in node.bases}
    if "LlamaForCausalLM" in bases:
        node = vllm.find("vllm.model_executor.models.llama:LlamaForCausalLM")
        bases = {ast.unparse(base) for base in node.bases}
    assert "SupportsPP" in bases
    (fused,) = (
        ast.literal_eval(statement.value)
        for statement in node.body
        if isinstance(statement, ast.Assign)
        and ast.unparse(statement.targets[0]) == "packed_modules_mapping"
    )
    assert fused == FUSED


# Experts

MOE = "vllm.model_executor.layers.fused_moe"
ROUTED = f"{MOE}.routed_experts:RoutedExperts"
UNQUANTIZED = f"{MOE}.unquantized_fused_moe_method:UnquantizedFusedMoEMethod"


def test_experts_are_held_as_the_switch_writes_them(vllm: Sources) -> None:
    """[experts, 2 x width, hidden], gate before up, and [experts, hidden, width]."""
    assert "quant_method" in vllm.attributes(ROUTED)
    begun = ast.unparse(vllm.find(f"{ROUTED}.__init__"))
    assert "self.intermediate_size_per_partition" in begun
    create = vllm.load(f"{UNQUANTIZED}.create_weights", torch=torch, set_weight_attrs=Mock())
    method = SimpleNamespace(moe=SimpleNamespace(is_act_and_mul=True, has_bias=False))
    layer = torch.nn.Module()
    create(method, layer, 3, 4, 5, torch.float32)
    assert layer.w13_weight.shape == (3, 10, 4)
    assert layer.w2_weight.shape == (3, 4, 5)

    load = vllm.load(f"{ROUTED}._load_w13", torch=torch)
    routed = SimpleNamespace(
        moe_config=SimpleNamespace(is_act_and_mul=True),
        _get_hidden_dim=lambda *_: 1,
        _narrow_expert_data_for_padding=lambda data, *_, **__: data,
    )
    for shard, value in (("w1", 1.0), ("w3", 3.0)):  # gate_proj, up_proj
        load(routed, layer.w13_weight.data[0], 0, shard, torch.full((5, 4), value), 0, True)
    assert layer.w13_weight[0, :, 0].tolist() == [1.0] * 5 + [3.0] * 5


def test_experts_written_in_place_stay_as_they_are(vllm: Sources) -> None:
    """The kernel that we ask for keeps experts, which are processed again after every switch."""
    oracle = f"{MOE}.oracle.unquantized"
    names = ("TRITON", "BATCHED_TRITON", "FLASHINFER_TRTLLM", "FLASHINFER_CUTLASS", "AITER")
    backends = SimpleNamespace(**{name: name for name in names})
    ask = vllm.load(f"{oracle}:map_unquantized_backend", UnquantizedMoeBackend=backends)
    assert ask(_arguments()["moe_backend"]) == "TRITON"
    convert = vllm.load(
        f"{oracle}:convert_to_unquantized_kernel_format",
        UnquantizedMoeBackend=backends,
        current_platform=SimpleNamespace(is_rocm=lambda: False),
    )
    replace = vllm.load(
        "vllm.model_executor.utils:replace_parameter", torch=torch, set_weight_attrs=Mock()
    )
    set_up = vllm.load(
        f"{UNQUANTIZED}._setup_kernel",
        convert_to_unquantized_kernel_format=convert,
        replace_parameter=replace,
        UnquantizedMoeBackend=SimpleNamespace(CPU="CPU"),
    )
    layer = torch.nn.Module()
    layer.moe_config = None
    for name in ("w13_weight", "w2_weight"):
        setattr(layer, name, torch.nn.Parameter(torch.rand(2, 4, 6), requires_grad=False))
    before = {name: (p.data_ptr(), p.clone()) for name, p in layer.named_parameters()}
    method = SimpleNamespace(moe_kernel=object(), unquantized_backend="TRITON")
    set_up(method, layer, layer.w13_weight, layer.w2_weight)
    for name, (place, values) in before.items():
        assert getattr(layer, name).data_ptr() == place
        assert torch.equal(getattr(layer, name), values)
    kernels = {
        node.name
        for node in vllm.find(f"{MOE}.experts.triton_moe:TritonExperts").body
        if isinstance(node, ast.FunctionDef)
    }
    assert "process_weights_after_loading" not in kernels  # that of its base class
    base = vllm.load(f"{MOE}.modular_kernel:FusedMoEExperts.process_weights_after_loading")
    assert base(None, layer) is None


def test_whole_experts_are_consecutive(vllm: Sources) -> None:
    """A tp rank has the experts that the layout gives it: its share, in order."""
    place = vllm.load(f"{MOE}.expert_map_manager:determine_expert_map", torch=torch)
    count, places, _ = place(4, 1, 8)
    assert count == 2
    assert places.tolist() == [-1, -1, 0, 1, -1, -1, -1, -1]


# Memory

WINDOWS = ("SlidingWindow", "FullAttention")


def test_a_start_needs_its_share_free(vllm: Sources) -> None:
    """So training is offloaded before the engine starts (`vllm_share`)."""
    request_memory = vllm.load(
        "vllm.v1.worker.utils:request_memory", math=math, format_gib=lambda size: size
    )
    memory = SimpleNamespace(total_memory=80, free_memory=40, device_="cuda:0")
    assert request_memory(memory, SimpleNamespace(gpu_memory_utilization=0.5)) == 40
    with pytest.raises(ValueError, match="Free memory"):
        request_memory(memory, SimpleNamespace(gpu_memory_utilization=0.51))


def test_groups_are_made_before_memory_is_measured(vllm: Sources) -> None:
    """Their buffers are not in the share."""
    source = ast.unparse(vllm.find(f"{WORKER}.init_device"))
    assert (
        0 < source.index("init_worker_distributed_environment(") < source.index("MemorySnapshot(")
    )


@pytest.mark.parametrize(
    ("name", "arguments"), [("unify_hybrid_kv_cache_specs", 1), ("may_override_num_blocks", 2)]
)
def test_cache_sizes_go_through_the_functions_that_we_replace(
    vllm: Sources, name: str, arguments: int
) -> None:
    """By their names in the module, with positional arguments: our own take no keywords."""
    calls = foreign.calls_of(vllm.tree(KV_UTILS), name)
    assert calls
    for call in calls:
        assert (len(call.args), call.keywords) == (arguments, [])
    assert vllm.has(KV_UTILS, "replace_as"), "we reach it there"


def test_a_window_becomes_full_attention_without_what_we_drop(vllm: Sources) -> None:
    """`replace_as` passes every field of the one class to the other, unless it is dropped."""
    window, full = (f"vllm.v1.kv_cache_interface:{name}Spec" for name in WINDOWS)
    (call,) = foreign.calls_of(
        ast.parse((OURS[0].parent / "memory.py").read_text()), "kv_cache_utils.replace_as"
    )
    words = {word.arg: word.value for word in call.keywords}
    kept = set(vllm.fields(window)) - set(ast.literal_eval(words["drop"]))
    assert kept <= set(vllm.fields(full))
    bases = [[ast.unparse(base) for base in vllm.find(spec).bases] for spec in (window, full)]
    assert bases == [["AttentionSpec"], ["AttentionSpec"]]
    assert "block_size" in vllm.fields("vllm.v1.kv_cache_interface:KVCacheSpec")


def test_a_vocabulary_is_padded_as_the_layout_says(vllm: Sources) -> None:
    padding = vllm.value(
        "vllm.model_executor.layers.vocab_parallel_embedding", "DEFAULT_VOCAB_PADDING_SIZE"
    )
    assert ast.literal_eval(padding) == VOCAB_MULTIPLE


def test_tool_parsers_take_our_calls(vllm: Sources) -> None:
    """`hybridrl/data/foreign_parsers.py` makes a parser, and has it read a text."""
    tree = ast.parse((ROOT / "hybridrl/data/foreign_parsers.py").read_text())
    parser = "vllm.tool_parsers.abstract_tool_parser:ToolParser"
    manager = "vllm.tool_parsers.abstract_tool_parser:ToolParserManager"
    for call, function in {
        "parser.extract_tool_calls": f"{parser}.extract_tool_calls",
        "ToolParserManager.get_tool_parser": f"{manager}.get_tool_parser",
        "vllm_parser(name)": f"{parser}.__init__",
    }.items():
        (written,) = foreign.calls_of(tree, call)
        foreign.bind(vllm.signature(function), written)
    protocol = vllm.path("vllm.entrypoints.openai.chat_completion.protocol").read_text()
    assert "class ChatCompletionRequest" in protocol
    source = vllm.path("vllm.tool_parsers.abstract_tool_parser").read_text()
    assert "tool_parsers: dict" in source
    assert "lazy_parsers: dict" in source
