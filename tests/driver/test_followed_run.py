"""Records of versions that are not those of the run that is to follow them."""

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import Mock

import pytest

from hybridrl.config import Config, ConfigError
from hybridrl.config.compose import register
from hybridrl.config.stored_run import composed_run
from hybridrl.data import Data
from hybridrl.driver import evaluate as evaluation
from hybridrl.driver.followed_run import check_followed, check_followed_inputs, recorded_run
from hybridrl.driver.inputs import inputs_of
from hybridrl.driver.origin import Origin
from hybridrl.driver.run import _judge_failures
from hybridrl.flow.executor import Computed
from hybridrl.flow.sample import SampleId, TokenSpan
from hybridrl.flow.turns import RecordDiffers
from hybridrl.flow.versions import (
    RunRecord,
    Segment,
    record_from_json,
    record_to_json,
    segments_of,
)
from hybridrl.schedule.following import Followed

POOL = ["schedule=async", "schedule.max_staleness=2", "cluster.ranks=2", "cluster.pools.rollout=1"]
LINES = [
    {"step": 121, "samples": [[[0, "", 0], [[0, 5]]], [[0, "", 1], [[0, 3], [1, 9]]]]},
    {
        "step": 122,
        "samples": [[[1, "", 0], [[1, 4]]]],
        "failed": [[[1, "", 0], 2, "timeout"]],
    },
]


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    flying = ["trainer.steps=2", "schedule.new_weights=in_flight", f"run.dir={tmp_path}"]
    register()
    composed_run(["recipe=grpo", *POOL, *flying])  # which writes them, as the command line does
    (tmp_path / "versions.jsonl").write_text("".join(json.dumps(x) + "\n" for x in LINES))
    return tmp_path


@pytest.mark.long
@pytest.mark.parametrize("ranks", [["cluster.ranks=3"], ["cluster.pools.rollout=0"]])
def test_a_record_is_read(
    make_config: Callable[..., Config], recorded: Path, ranks: list[str]
) -> None:
    follow = [f"schedule.follow={recorded}", "trainer.steps=2", *ranks]
    config = make_config("recipe=grpo", *POOL, *follow)
    check_followed(config)
    record = recorded_run(config)
    assert record is not None
    second = SampleId(0, k=1)
    assert record.versions[second] == (Segment(0, 3), Segment(1, 9))
    assert recorded_run(make_config("recipe=grpo", *POOL)) is None
    followed = Followed(record)
    assert [followed.rests_at(second, n) for n in (0, 2, 3, 8)] == [3, 3, 0, 0]
    assert [followed.segment(second, n).steps for n in (0, 2, 3, 8)] == [0, 0, 1, 1]
    assert record.batches == {0: [0], 1: [1]}
    assert record.failures == {SampleId(1, k=0): (2, "timeout")}
    followed.check(record.versions, record.failures)
    with pytest.raises(RecordDiffers, match=r"sample 0\.1 goes on after 9 tokens"):
        followed.segment(second, 9)
    with pytest.raises(RecordDiffers, match=r"it has no sample 7\.0"):
        followed.segment(SampleId(7, k=0), 0)
    with pytest.raises(RecordDiffers, match=r"0\.1 has tokens up to 4 by v_0, not 3 by v_0, 9 by"):
        followed.check({second: (Segment(0, 4),)}, {})
    with pytest.raises(RecordDiffers, match=r"1\.0 ends; there it fails at turn 2 \(timeout\)"):
        followed.check(record.versions, {})


def test_an_evaluation_follows_no_record(
    make_config: Callable[..., Config], recorded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On ranks that train too, with S = 0: it has other prompts, and the steps of the record."""
    schedule = Mock()
    schedule.return_value.run_step.side_effect = LookupError
    monkeypatch.setattr(evaluation, "make_schedule", schedule)
    config = make_config("recipe=grpo", "schedule=periodic", f"schedule.follow={recorded}")
    executor = Mock(apart=nullcontext)
    with pytest.raises(LookupError):
        evaluation.evaluate(config, "main", Mock(), executor, [], 0, Mock())
    kind = schedule.call_args.args[1]
    assert not kind.follows


def test_a_reply_is_of_the_segment_that_goes_on_after_it() -> None:
    """Whichever weights were there when it came: no sample rests where these did nothing."""
    spans = [(0, 14, 0, True), (14, 18, 0, False), (18, 24, 2, True), (24, 26, 2, False)]
    segments = segments_of([TokenSpan(*span) for span in spans], {0: 0, 2: 1})
    assert segments == (Segment(0, 14), Segment(1, 24))


def test_judgements_that_have_failed_fail_again(
    make_config: Callable[..., Config], recorded: Path, tmp_path: Path
) -> None:
    line = {"step": 121, "id": "0.1", "failed": {"reward_status": "timeout"}}
    (recorded / "judges").mkdir()
    (recorded / "judges" / "failures.jsonl").write_text(json.dumps(line) + "\n")
    config = make_config("recipe=grpo", *POOL, f"schedule.follow={recorded}", "run.dir=elsewhere")
    scalars = {"reward": (1.0, 0.5), "reward_status": ("ok", "ok")}
    judged = Computed("reward", (SampleId(0, k=1), SampleId(1, k=0)), scalars, ())
    again = _judge_failures(config, Origin({}, None)).followed(judged)
    assert isinstance(again, Computed)
    assert again.scalars == {"reward": (0.0, 0.5), "reward_status": ("timeout", "ok")}


def test_caches_that_were_computed_again_are_in_the_record() -> None:
    """Each begins a segment, of the weights that have done it."""
    spans = [
        (0, 6, 0, True),
        (6, 9, 2, True),
        (9, 12, 2, True, True),
        (12, 14, 2, False),
        (14, 18, 2, True),
        (18, 20, 4, True, True),
    ]
    segments = segments_of([TokenSpan(*span) for span in spans], {0: 0, 2: 1, 4: 2})
    wanted = Segment(0, 6), Segment(1, 9), Segment(1, 18, True), Segment(2, 20, True)
    assert segments == wanted
    id = SampleId(0, k=0)
    line = record_to_json(RunRecord({id: segments}, {}))
    assert line["samples"][0][1] == [[0, 6], [1, 9], [1, 18, 1], [2, 20, 1]]
    record = record_from_json([{"step": 1, **line}], 1)
    assert record.versions == {id: wanted}
    followed = Followed(record)
    assert [n for n in range(20) if followed.recomputes(id, n)] == [9, 18]
    assert [followed.rests_at(id, n) for n in (0, 6, 9, 18)] == [6, 9, 18, 0]
    with pytest.raises(RecordDiffers, match=r"9 by v_1, 20 by v_2, not 6 .*, 18 by v_1 on a cache"):
        followed.check({id: (Segment(0, 6), Segment(1, 9), Segment(2, 20))}, {})


@pytest.mark.parametrize(
    ("more", "error"),
    [
        (
            "schedule.follow=nowhere",
            r"schedule\.follow=nowhere: wanted the directory of a run",
        ),
        ("trainer.steps=3", r"wanted a record of steps 121 to 123: this one ends with step 122"),
        ("run.seed=5", r"run\.seed=5: wanted 0, as in .*\(schedule\.follow\)"),
        ("recipe.kl_coef=0.5", r"recipe\.kl_coef=0\.5: wanted "),
        ("rollout=vllm", r"rollout\.engine=vllm: wanted native, as in"),
        (
            "environment=python environment.replay=false",
            r"environment\.replay=False: wanted true with schedule",
        ),
        ("schedule.max_staleness=3", r"schedule\.max_staleness=3: wanted 2, as in"),
        (
            "recipe=gspo",
            r"recipe\.target=\S+gspo: wanted \S+grpo, as in .*; recipe\.clip_high, recipe\.clip",
        ),
    ],
)
def test_another_run_is_refused(
    make_config: Callable[..., Config], recorded: Path, more: str, error: str
) -> None:
    follow = [f"schedule.follow={recorded}", "trainer.steps=2"]
    with pytest.raises(ConfigError, match=error):
        check_followed(make_config("recipe=grpo", *POOL, *follow, *more.split()))


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("", r"steps 121 to 122: this one lacks step 121"),
        ('{"step": 121, "samp', r"steps 121 to 122: this one lacks step 121"),
        ('{"step": 121, "samples": [[[1]]]}', r"versions\.jsonl as a run writes it \(ValueError: "),
        ('{"step": 121}', r"versions\.jsonl as a run writes it \(KeyError: 'samples'\)"),
        (
            '{"step": 121, "samples": [[[0, "", 0], [[0, null]]]]}',
            r"versions\.jsonl as a run writes it \(TypeError: ",
        ),
    ],
)
def test_a_damaged_record_is_refused(
    make_config: Callable[..., Config], recorded: Path, line: str, told: str
) -> None:
    """Before a rank starts, whichever of its lines it is."""
    file = recorded / "versions.jsonl"
    file.write_text(f"{line}\n{file.read_text().splitlines()[1]}\n")
    follow = [f"schedule.follow={recorded}", "trainer.steps=2"]
    with pytest.raises(ConfigError, match=told) as error:
        check_followed(make_config("recipe=grpo", *POOL, *follow))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("more", [[], ["deterministic=strict"], ["rollout.dtype=float32"]])
def test_tokens_that_rounding_may_change_are_told(
    make_config: Callable[..., Config],
    recorded: Path,
    caplog: pytest.LogCaptureFixture,
    more: list[str],
) -> None:
    own = ["recipe=grpo", *POOL, "rollout.dtype=bfloat16", *more]
    composed_run([*own, "trainer.steps=2", f"run.dir={recorded}"])
    check_followed(make_config(*own, f"schedule.follow={recorded}", "trainer.steps=2"))
    told = [record.getMessage() for record in caplog.records]
    assert any("rollout.dtype=bfloat16 rounds otherwise" in line for line in told) == (not more)


def test_other_data_and_code_are_refused(
    make_config: Callable[..., Config], recorded: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Under the same settings: what files say has changed. Earlier versions recorded none of it.

    What an evaluation set is judged by may change.
    """
    follow = [f"schedule.follow={recorded}", "trainer.steps=2"]
    judge = "+eval.sets={own: {reward: {kind: function, function: 'hybridrl.recipes.grpo:grpo'}}}"
    config = make_config("recipe=grpo", *POOL, *follow, judge)
    data = Data([], [], {"words": 1.0}, {})
    check_followed_inputs(config, data)
    inputs, file = inputs_of(config, data), recorded / "environment.json"
    recipe = next(name for name in inputs["code"] if name.startswith("recipe "))
    rooms = {name: "of an earlier version" for name in inputs["code"] if name != recipe}
    assert any(name.startswith("eval.sets.own") for name in rooms)
    file.write_text(json.dumps({"inputs": inputs | {"code": rooms}}))
    check_followed_inputs(config, data)
    for kind, name, told in (
        ("data", "words", "the data of source words"),
        ("code", recipe, recipe),
    ):
        file.write_text(json.dumps({"inputs": inputs | {kind: {name: "other"}}}))
        # Its newest process ended before it had recorded any.
        file.rename(recorded / "earlier-1-environment.json")
        file.write_text(json.dumps({"time": 5}))
        with pytest.raises(ConfigError, match=rf"was made with; changed since: {told} \(trainer"):
            check_followed_inputs(config, data)
        config.trainer.resume_changed = True
        check_followed_inputs(config, data)
        assert caplog.messages[-1] == f"changed since {recorded}: {told}"
        config.trainer.resume_changed = False


def test_conversations_that_have_lost_caches_are_read(
    make_config: Callable[..., Config], recorded: Path
) -> None:
    """Where a turn has ended with 3 tokens, the weights that read its reply compute all again."""
    lost = {"step": 123, "samples": [[[2, "", 0], [[2, 3], [2, 9, 1]]]]}
    with (recorded / "versions.jsonl").open("a") as file:
        file.write(json.dumps(lost) + "\n")
    follow = [f"schedule.follow={recorded}", "trainer.steps=2"]
    record = recorded_run(make_config("recipe=grpo", *POOL, *follow, "environment=python"))
    assert record is not None
    followed, id = Followed(record), SampleId(2, k=0)
    assert [n for n in range(9) if followed.recomputes(id, n)] == [3]
    assert followed.rests_at(id, 0) == 3
