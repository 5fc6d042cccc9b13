"""Who takes part in a per-sample stage."""

import pytest

from hybridrl.flow.executor import Scope
from hybridrl.flow.graph import ComputeStage, MapStage, StageMethod
from hybridrl.preflight.placement import scope_of

VLLM = "rollout=vllm"
BF16 = "rollout.dtype=bfloat16"


@pytest.mark.parametrize(
    ("role", "method", "overrides", "scope"),
    [
        ("actor", "log_probs", [], Scope.INSTANCE),  # with the weights that generate
        ("actor", "log_probs", [BF16], Scope.WORLD),
        ("actor", "log_probs", [BF16, "model.compute_dtype=bfloat16"], Scope.INSTANCE),
        ("actor", "log_probs", [VLLM], Scope.WORLD),  # which vLLM packs for itself
        ("actor", "log_probs", [VLLM, BF16, "model.compute_dtype=bfloat16"], Scope.WORLD),
        ("reference", "log_probs", [], Scope.INSTANCE),
        ("reference", "log_probs", [VLLM], Scope.INSTANCE),
        ("reward", "score", [VLLM], Scope.RANK),
        ("reward", "score", [VLLM, "reward=model", "reward.model=x"], Scope.INSTANCE),
    ],
)
def test_scope(role, method, overrides, scope, make_config):
    stage = ComputeStage(
        name="stage", inputs=("tokens",), outputs=("x",), role=role, method=StageMethod(method)
    )
    assert scope_of(stage, make_config(*overrides, "run.dir=out")) is scope


def test_a_map_runs_where_its_samples_are(make_config):
    stage = MapStage(name="map", outputs=("x",), function=len, returns=("x",))
    assert scope_of(stage, make_config(VLLM, "run.dir=out")) is Scope.RANK
