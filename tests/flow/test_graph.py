"""What a recipe's author can get wrong is found while the graph is built, and said clearly."""

import pickle
from dataclasses import dataclass

import pytest

from hybridrl.config.loss import Loss
from hybridrl.flow import Flow, Graph, RecipeState, recipe
from hybridrl.flow.graph import ComputeStage, GenerateStage, SamplingOverrides, UpdateStage


@dataclass(frozen=True)
class ToyLoss(Loss):
    fields: tuple[str, ...] = ()

    def __call__(self, log_probs, entropy, fields):
        raise AssertionError("only what it reads matters here")


class PairLoss(ToyLoss):
    samples_per_row = 2


def scored(flow, **kwargs):
    return flow.reward.score(flow.actor.generate(flow.prompts, num_samples=2, **kwargs))


def test_stages_are_appended_in_the_recipe_s_order_with_their_fields():
    flow = Flow()
    samples = scored(flow, temperature=0.7)
    samples = flow.actor.log_probs(samples)
    samples = samples.by_group(lambda rewards: rewards, outputs=("advantage",))
    flow.actor.update(samples, loss=ToyLoss(("advantages", "old_log_probs")), epochs=3)
    stages = flow.graph.stages
    assert list(stages) == [
        "prompts",
        "generate",
        "reward",
        "old_log_probs",
        "by_group",
        "update_actor",
    ]
    assert stages["generate"].sampling == SamplingOverrides(temperature=0.7)
    assert stages["reward"].scalars == ("reward", "reward_status")
    assert stages["old_log_probs"].scalars == ()
    update = stages["update_actor"]
    assert update.inputs == ("tokens", "advantage", "old_log_probs")
    assert update.fields == {
        "advantages": "advantage",
        "old_log_probs": "old_log_probs",
    }
    assert (update.epochs, update.mini_batches) == (3, None)
    assert flow.graph.ancestors("reward") == {"prompts", "generate"}
    assert flow.graph.roles == ("actor", "reward")


def test_old_log_probs_fall_back_to_the_rollout_s_and_can_be_chosen():
    flow = Flow()
    samples = scored(flow)
    flow.actor.update(samples, loss=ToyLoss(("old_log_probs",)))
    assert flow.graph.stages["update_actor"].fields == {"old_log_probs": "log_probs"}
    flow.actor.update(
        samples, loss=ToyLoss(("weights",)), fields={"weights": "reward"}, name="second"
    )
    assert flow.graph.stages["second"].fields == {"weights": "reward"}


def test_two_rewards_and_other_branches_have_names_of_their_own():
    flow = Flow()
    samples = flow.reward.score(scored(flow), name="helpful")
    greedy = flow.reward.score(flow.actor.generate(flow.prompts, greedy=True, name="greedy"))
    joined = samples.join(greedy, prefix="greedy_")
    assert {"reward", "helpful", "helpful_status", "greedy_reward"} <= joined.scalars
    assert "reward@greedy" in flow.graph.stages


def test_pairs_have_what_both_sides_have():
    flow = Flow()
    chosen, rejected = flow.targets("chosen"), flow.targets("rejected")
    chosen = flow.reference.log_probs(chosen)
    pairs = chosen.pair(rejected)
    assert (pairs.num_samples, pairs.samples_per_row) == (2, 2)
    assert pairs.fields == {"tokens", "finish", "side"}
    flow.actor.update(pairs, loss=PairLoss())
    assert flow.graph.stages["update_actor"].samples_per_row == 2


ERRORS = {
    "missing field": (
        lambda flow: flow.actor.generate(flow.prompts).by_group(list),
        r"'list' wants the field 'reward', which no stage before it makes; available are "
        r"\['finish', 'log_probs', 'tokens'\]",
    ),
    "missing loss field": (
        lambda flow: flow.actor.update(scored(flow), loss=ToyLoss(("advantages",))),
        r"the loss wants the field 'advantages' \(as advantages or advantage\), which no stage",
    ),
    "unknown loss field": (
        lambda flow: flow.actor.update(scored(flow), loss=ToyLoss(()), fields={"x": "reward"}),
        r"got fields \['x'\], wanted some of \[\]",
    ),
    "two stages of one name": (
        lambda flow: (scored(flow), flow.actor.generate(flow.prompts)),
        r"two stages are named 'generate': wanted another name",
    ),
    "one field twice": (
        lambda flow: flow.reward.score(scored(flow)),
        r"would make the field 'reward', which stage 'reward' makes already",
    ),
    "one field twice on two branches": (
        lambda flow: (lambda s: (s.by_group(list, name="a"), s.by_group(list, name="b")))(
            scored(flow)
        ),
        r"stage 'b' would make the field 'advantage', which stage 'a' makes already",
    ),
    "a tensor at a barrier": (
        lambda flow: scored(flow).by_group(list, inputs=("log_probs",)),
        r"wants \['log_probs'\], which are tensors.*map\(..., scalars=...\)",
    ),
    "join of two flows": (
        lambda flow: scored(flow).join(scored(Flow()), prefix="other_"),
        r"'join_other' joins unrelated streams",
    ),
    "join with itself": (
        lambda flow: (lambda s: s.join(s, prefix="other_"))(scored(flow)),
        r"joins a stream with itself: both hold the samples of \['generate'\]",
    ),
    "join of other group sizes": (
        lambda flow: scored(flow).join(
            flow.actor.generate(flow.prompts, num_samples=3, name="b"), prefix="b_"
        ),
        r"got 3 samples a prompt, wanted 1 or 2",
    ),
    "join without a prefix": (
        lambda flow: scored(flow).join(flow.answers, prefix=""),
        r"got an empty prefix",
    ),
    "pair of unequal groups": (
        lambda flow: scored(flow).pair(flow.answers),
        r"got 2 and 1 samples a prompt, wanted as many on both sides",
    ),
    "two takes": (
        lambda flow: scored(flow).take(1).take(2, name="again"),
        r"take 'again': got a second take, wanted only 'take'",
    ),
    "take of nothing": (
        lambda flow: scored(flow).take(0),
        r"take 'take': got num_groups=0, wanted 1 or more",
    ),
    "take after by_batch": (
        lambda flow: scored(flow).by_batch(list).take(2),
        r"'take' comes after by_batch 'list'",
    ),
    "map without outputs": (
        lambda flow: scored(flow).map(len, inputs=("tokens",)),
        r"got no outputs",
    ),
    "generate from samples": (
        lambda flow: flow.actor.generate(scored(flow)),
        r"generate: got Stream, wanted flow.prompts",
    ),
    "no samples": (
        lambda flow: flow.actor.generate(flow.prompts, num_samples=0),
        r"'generate': got num_samples=0",
    ),
    "greedy and warm": (
        lambda flow: flow.actor.generate(flow.prompts, greedy=True, temperature=1.0),
        r"got greedy and temperature=1.0",
    ),
    "no epochs": (
        lambda flow: flow.actor.update(flow.answers, loss=ToyLoss(), epochs=0),
        r"'update_actor': got epochs=0, wanted 1 or more",
    ),
    "no loss": (
        lambda flow: flow.actor.update(flow.answers, loss=lambda log_probs, entropy, fields: 0),
        r"'update_actor': got a function as its loss, wanted an object whose class derives from "
        r"hybridrl\.algorithms\.Loss",
    ),
    "pairs wanted": (
        lambda flow: flow.actor.update(flow.answers, loss=PairLoss()),
        r"'update_actor': PairLoss looks at 2 samples together, got a stream of samples_per_row=1",
    ),
    "unknown copy": (
        lambda flow: flow.copy(flow.actor, update="ema"),
        r"copy 'actor_ema': got update='ema', wanted frozen or ewma",
    ),
    "copy without decay": (
        lambda flow: flow.copy(flow.actor, update="ewma"),
        r"copy 'actor_ewma'.*wanted 0 < decay < 1",
    ),
    "two copies of one name": (
        lambda flow: (flow.copy(flow.actor), flow.copy(flow.actor)),
        r"two copies are named 'actor_frozen'",
    ),
    "copy named as a role": (
        lambda flow: flow.copy(flow.actor, name="reference"),
        r"copy 'reference': the name is a role's",
    ),
    "two states of one name": (
        lambda flow: (flow.state("m", 1.0), flow.state("m", 2.0)),
        r"two recipe states are named 'm'",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case):
    build, message = ERRORS[case]
    with pytest.raises(ValueError, match=message):
        build(Flow())


def test_a_recipe_that_trains_nothing_is_refused():
    @recipe("idle")
    def idle(flow, cfg):
        scored(flow)

    with pytest.raises(ValueError, match=r"trains nothing: got the stages .*'reward'"):
        idle.build(None)


def test_the_ranks_graph_pickles_without_driver_functions_and_state():
    flow = Flow()
    multiplier = flow.state("multiplier", 1.0)
    samples = scored(flow).by_group(lambda r: [multiplier.get() * x for x in r])
    flow.actor.update(samples, loss=ToyLoss(("advantages",)))
    sent = pickle.loads(pickle.dumps(flow.graph.on_ranks()))
    assert [type(s) for s in sent.stages.values()] == [GenerateStage, ComputeStage, UpdateStage]
    with pytest.raises(TypeError, match="'multiplier' lives in the driver"):
        pickle.dumps(multiplier)


def test_state_of_another_recipe_is_refused():
    graph = Graph(states={"a": 1.0})
    RecipeState(graph, "a").set(3)
    assert graph.state_dict() == {"a": 3.0}
    with pytest.raises(ValueError, match=r"got \['b'\], wanted \['a'\]"):
        graph.load_state_dict({"b": 1.0})
