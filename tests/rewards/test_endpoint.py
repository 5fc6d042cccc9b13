"""Judges behind HTTP against a real server that delays, fails and talks nonsense."""

import asyncio
import json
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from stubs import StubJudge, grade

from hybridrl.config import ConfigError, EndpointConfig, RewardCall, RewardConfig, RewardKind
from hybridrl.rewards import JudgePool, RewardInput, RewardResult, validate_reward
from hybridrl.rewards.endpoint import Endpoint
from hybridrl.rewards.results import BUDGET_SPENT, BudgetSpent, EndpointError, result_of
from hybridrl.rewards.worker import answered, endpoint_judge

KEY = "sk-verysecret123"


def config_of(stub: Any, kind: str = "chat", call: str = "sample", **settings: Any) -> RewardConfig:
    """A judge; `{response}` alone is the request's text unless there is another template."""
    outer = {"max_in_flight": settings.pop("max_in_flight", 8)}
    if "extract" in settings:
        outer["extract"] = settings.pop("extract")
    if kind == "chat" and call == "sample":
        settings = {"template": "{response}", "score_range": [0.0, 10.0], **settings}
    settings = {"backoff_s": 0.01, "model": "stub", **settings}
    url = stub.url if kind == "chat" else stub.url.replace("/v1", "/score")
    endpoint = EndpointConfig(**{"url": url, **settings})
    kinds = {"kind": RewardKind(kind), "call": RewardCall(call)}
    config = RewardConfig(**kinds, **outer, endpoint=endpoint)
    config.check("reward")
    return config


def judged(
    config: RewardConfig, units: Sequence[Sequence[str]], replies: Path | None = None
) -> list[list[RewardResult]]:
    """As the process of a judge does it, in this one."""

    async def judge_all() -> list[list[Any]]:
        endpoint = Endpoint(config, replies)
        judge = endpoint_judge(config, endpoint)
        row = {"question": "Q"}
        inputs = [[RewardInput("P", r, "A", row, question="Asked") for r in unit] for unit in units]
        try:
            return await asyncio.gather(
                *(answered(judge, unit, config.timeout_s) for unit in inputs)
            )
        finally:
            await endpoint.close()

    by_unit = asyncio.run(judge_all())
    for answers in by_unit:
        if answers[0] == BUDGET_SPENT:
            raise BudgetSpent(answers[1])
    return [[result_of(answer) for answer in answers] for answers in by_unit]


def rewards(config: RewardConfig, responses: Sequence[str], **more: Any) -> list[float]:
    results = [result for (result,) in judged(config, [[r] for r in responses], **more)]
    assert [(r.status, r.message) for r in results] == [("ok", "")] * len(results)
    return [result.reward for result in results]


TROUBLES = ["429", "500", "garbage", "drop", "503", "99", "none"]


def test_every_sample_gets_its_own_reward_through_every_trouble() -> None:
    """Two of three samples are in trouble, up to three times; no more are in flight than allowed.

    "99" and "none" are grades that are none.
    """
    responses = [f"response {i}" for i in range(120)]

    def trouble(text: str, attempt: int) -> str | None:
        number = int(text.split()[1])
        return TROUBLES[number % len(TROUBLES)] if attempt < number % 3 + number % 2 else None

    delays = iter(0.001 * (i * 37 % 50) for i in range(10_000))
    with StubJudge(delay=lambda: next(delays), trouble=trouble) as stub:
        scores = rewards(config_of(stub, score=r"Score: (\w+)"), responses)
        assert scores == [grade(response) / 10 for response in responses]
        assert stub.most_in_flight == 8
        assert stub.asked == {f"response {i}": 1 + i % 3 + i % 2 for i in range(120)}


def test_one_that_hangs_holds_no_other_up() -> None:
    """The last of many is judged while the first still hangs."""
    with StubJudge(trouble=lambda text, attempt: "hang" if text == "slow" else None) as stub:
        config = config_of(stub, timeout_s=1.0, retries=0, max_in_flight=2)
        with closing(JudgePool(config)) as judge:
            slow = judge.submit([RewardInput("", "slow", "")])
            others = [judge.submit([RewardInput("", str(i), "")]) for i in range(50)]
            for i, future in enumerate(others):
                assert future.result(60)[0].reward == grade(str(i)) / 10
            assert not slow.done()
            (result,) = slow.result(60)
        assert (result.status, result.message) == ("timeout", "no reply within 1 s")


FAILS = {
    "401": "error: HTTP 401 Unauthorized: no, Bearer ***",
    "400": "error: HTTP 400 Bad Request: no, Bearer ***",
    "500": "error: HTTP 500 Internal Server Error: no, Bearer ***",
    "garbage": "error: no JSON: '<html>Sorry</html>'",
    "99": "error: the score 99 is not from 0 to 10",
    "drop": "error: ServerDisconnectedError",
}
ASKED_ONCE = ("401", "400")


def test_what_fails_for_good_scores_zero_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", KEY)
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login me password mine\n")
    monkeypatch.setenv("NETRC", str(netrc))
    with StubJudge(trouble=lambda text, attempt: text if text in FAILS else None) as stub:
        config = config_of(stub, retries=2, key_env="JUDGE_KEY")
        results = judged(config, [[text] for text in [*FAILS, "fine"]], tmp_path / "replies")
        asked, keys = dict(stub.asked), set(stub.keys)
    for (text, wanted), (result,) in zip(FAILS.items(), results, strict=False):
        assert result.recorded_status.startswith(wanted)
        assert KEY not in result.recorded_status
        assert result.reward == 0
        assert asked[text] == (1 if text in ASKED_ONCE else 3)
    assert results[0][0].recorded_status == FAILS["401"]
    assert results[-1][0].reward == grade("fine") / 10
    assert keys == {f"Bearer {KEY}"}
    assert KEY not in (tmp_path / "replies").read_text()


def test_the_environments_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stub takes requests as a proxy does; `no_proxy` names who is asked without one."""
    with StubJudge() as stub:
        config = config_of(stub, retries=0)
        config.endpoint.url = "http://judge.invalid/v1"
        monkeypatch.setenv("http_proxy", f"me:mine@127.0.0.1:{stub.port}")
        assert rewards(config, ["a"]) == [grade("a") / 10]
        assert stub.keys == {""}
        monkeypatch.setenv("no_proxy", "judge.invalid")
        ((result,),) = judged(config, [["b"]])
    assert result.message.startswith("ClientConnector")


def test_retry_after_is_kept_to() -> None:
    """The stub asks for 0.2 s, more than the backoff."""
    times: list[float] = []

    def trouble(text: str, attempt: int) -> str | None:
        times.append(time.monotonic())
        return "429" if attempt < 2 else None

    with StubJudge(trouble=trouble) as stub:
        rewards(config_of(stub, backoff_s=0.0), ["a"])
    assert len(times) == 3
    assert min(times[1] - times[0], times[2] - times[1]) >= 0.2


def test_a_waiting_retry_leaves_its_place() -> None:
    """With one place: while a request waits for its retry, others have their turn."""
    order: list[str] = []

    def trouble(text: str, attempt: int) -> str | None:
        order.append(text)
        return "429" if text == "first" and attempt == 0 else None

    with StubJudge(trouble=trouble) as stub:
        rewards(config_of(stub, max_in_flight=1), ["first", "a", "b", "c"])
    assert order == ["first", "a", "b", "c", "first"]


@pytest.mark.long
def test_replies_are_kept_and_shared(tmp_path: Path) -> None:
    """Equal requests are sent once, at the same time, later, and by another run."""
    with StubJudge(delay=lambda: 0.05) as stub:
        config = config_of(stub)
        file = tmp_path / "judges" / "reward.jsonl"
        with closing(JudgePool(config, replies=file)) as judge:
            for _ in range(2):
                futures = [judge.submit([RewardInput("", "same", "")]) for _ in range(5)]
                assert {f.result(60)[0].reward for f in futures} == {grade("same") / 10}
            assert judge.counts == {"requests": 1, "retries": 0, "cached": 9}
            (process,) = judge._processes
            process.popen.kill()
            while judge._processes == [process]:
                time.sleep(0.01)  # the next one counts on
            assert judge.submit([RewardInput("", "same", "")]).result(60)[0].status == "ok"
            assert judge.counts == {"requests": 1, "retries": 0, "cached": 10}
        with file.open("a") as open_file:
            open_file.write('{"key": "cut o')  # a run that was killed
        assert rewards(config, ["same", "new"], replies=file) == [
            grade("same") / 10,
            grade("new") / 10,
        ]
        assert stub.asked == {"same": 1, "new": 1}
        assert rewards(config, ["same", "new"], replies=file)[1] == grade("new") / 10
        assert stub.asked == {"same": 1, "new": 1}
        other = config_of(stub, temperature=1.0)
        rewards(other, ["same"], replies=file)
        assert stub.asked["same"] == 2
        rewards(config_of(stub, cache=False), ["same", "same"], replies=file)
        assert stub.asked["same"] == 4


def test_a_reply_that_another_expression_reads_is_not_asked_for_again(tmp_path: Path) -> None:
    file = tmp_path / "replies"
    with StubJudge() as stub:
        rewards(config_of(stub), ["a"], replies=file)
        whole = config_of(stub, score=r"Score: (\d+)", score_range=None)
        assert rewards(whole, ["a"], replies=file) == [grade("a")]
        assert stub.asked == {"a": 1}
        rewards(config_of(stub, score=r"(\d+)$"), ["a"], replies=file)
        assert stub.asked == {"a": 1}


@pytest.mark.long
def test_the_budget_holds_over_resumed_runs(tmp_path: Path) -> None:
    file = tmp_path / "replies"
    with StubJudge(delay=lambda: 0.01) as stub:
        unbounded = config_of(stub, cache=False)
        assert len(rewards(unbounded, ["0", "0"], replies=file)) == 2
        config = config_of(stub, budget=20)
        assert len(rewards(config, [str(i) for i in range(10)], replies=file)) == 10
        with closing(JudgePool(config, replies=file)) as judge:
            futures = [judge.submit([RewardInput("", str(i), "")]) for i in range(40)]
            with pytest.raises(BudgetSpent, match=r"^reward\.endpoint\.budget=20: all of these"):
                [future.result(60) for future in futures]
        assert sum(stub.asked.values()) == 20
        assert rewards(config, ["0", "9"], replies=file) == [grade("0") / 10, grade("9") / 10]
        with pytest.raises(BudgetSpent):
            rewards(config, ["more"], replies=file)
        more = config_of(stub, budget=60)
        assert len(rewards(more, [str(i) for i in range(40)], replies=file)) == 40
        assert sum(stub.asked.values()) == 42


def test_retries_count_in_the_budget() -> None:
    with StubJudge(trouble=lambda text, attempt: "500") as stub:
        with pytest.raises(BudgetSpent):
            rewards(config_of(stub, budget=3, retries=5), ["a"])
        assert stub.asked == {"a": 3}


def test_the_built_in_rubric() -> None:
    with StubJudge() as stub:
        config = config_of(stub, template=None, score_range=None, body={"max_tokens": None, "n": 1})
        (score,) = rewards(config, ["my {response}"])
        (body,) = stub.bodies
    assert body.keys() == {"model", "messages", "temperature", "n"}
    (message,) = body["messages"]
    text = message["content"]
    assert "Task:\nAsked\n" in text  # the row's own column has another one
    assert "answer:\nA\n" in text
    assert "Response:\nmy {response}\n" in text
    assert score == grade(text) / 10


@pytest.mark.parametrize("kind", ["chat", "http"])
def test_a_group_is_one_request(kind: str) -> None:
    groups = [["a", "b", "c"], ["d"], ["b", "a"]]
    with StubJudge() as stub:
        results = judged(config_of(stub, kind, "group"), groups)
        assert len(stub.bodies) == 3
    scale = 10 if kind == "chat" else 1
    wanted = [[grade(text) / scale for text in group] for group in groups]
    assert [[r.reward for r in group] for group in results] == wanted


REPLIES: dict[str, tuple[str, list[float] | None]] = {
    "in order": ("Score 1: 2\nScore 2: 4.5", [0.2, 0.45]),
    "not in order": ("Score 2: 4.5\nScore 1: 2", [0.2, 0.45]),
    "of others": ("Score 3: 9\nScore 1: 5", None),
    "one twice": ("Score 1: 9\nScore 1: 5", None),
    "too many": ("Score 1: 9\nScore 2: 5\nScore 3: 5", None),
    "without numbers": ("Score: 9\nScore: 5", None),
}


@pytest.mark.parametrize("name", REPLIES)
def test_scores_of_a_group_by_their_number(name: str) -> None:
    text, wanted = REPLIES[name]
    reply = json.dumps({"choices": [{"message": {"content": text}}]})
    endpoint = Endpoint(group_config())
    if wanted is not None:
        assert endpoint.read(reply, 2) == wanted
        return
    with pytest.raises(EndpointError, match=r"wanted each of 1 to 2 once"):
        endpoint.read(reply, 2)


def test_a_lone_response_needs_no_number() -> None:
    reply = json.dumps({"choices": [{"message": {"content": "It is fine.\nScore: 7"}}]})
    assert Endpoint(group_config()).read(reply, 1) == [0.7]


def group_config() -> RewardConfig:
    endpoint = EndpointConfig(url="http://127.0.0.1:1/v1", model="m")
    return RewardConfig(kind=RewardKind.chat, call=RewardCall.group, endpoint=endpoint)


def test_http_sends_the_row_and_reads_a_field() -> None:
    with StubJudge() as stub:
        http = config_of(stub, "http", body={"style": "x", "answer": None})
        assert rewards(http, ["a", "b"]) == [
            grade("a"),
            grade("b"),
        ]
        body = sorted(stub.bodies, key=lambda body: str(body["response"]))[0]
        assert body == {
            "prompt": "P", "item": {"question": "Q"}, "response": "a", "style": "x",
        }  # fmt: skip
        ((result,),) = judged(config_of(stub, "http", score="a.b[", retries=0), [["a"]])
        assert result.message.startswith("a.b[ is not a number: {'score':")


def test_only_the_extracted_text_is_judged() -> None:
    with StubJudge() as stub:
        config = config_of(stub, extract="#(.*)")
        results = judged(config, [["think #yes"], ["no marker"]])
        assert stub.asked == {"yes": 1}
    assert [(r.reward, r.text) for (r,) in results] == [(grade("yes") / 10, "yes"), (0, "")]


@pytest.mark.parametrize("where", ["extract", "score"])
def test_an_expression_that_backtracks_for_ever_ends(where: str) -> None:
    """The user's expression on a model's text, which would hold up the loop, and so the run."""
    endless = "x" * 64 + "!"
    with StubJudge(trouble=lambda text, attempt: endless if text == "bad" else None) as stub:
        config = config_of(stub, **{where: r"((?:\w+)+)$"})
        config.timeout_s = 0.3
        results = judged(config, [["good"], ["bad" if where == "score" else endless]])
    assert results[0][0].reward == grade("good") / 10
    assert results[1][0].recorded_status == "timeout: no reward within 0.3 s"


# -- before a run ----------------------------------------------------------------------------------


@pytest.mark.long
def test_an_endpoint_is_tried_before_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    with StubJudge() as stub:
        assert not validate_reward(config_of(stub)).waits
        assert asyncio.run(probed(config_of(stub, "http")))  # its 405 is an answer, too
        with pytest.raises(
            ConfigError, match=r"^cost\.endpoint\.key_env=NO_KEY: wanted a variable"
        ):
            validate_reward(config_of(stub, key_env="NO_KEY"), role="cost")
        wrong = f"http://127.0.0.1:{stub.port}"
        for kind, at in (("chat", f"{wrong}/chat/completions"), ("http", f"{wrong}/none")):
            config = config_of(stub, kind, url=wrong if kind == "chat" else f"{wrong}/none")
            with pytest.raises(ConfigError, match=rf"^reward\.endpoint\.url=.* \({at} is HTTP 404"):
                asyncio.run(probed(config))
        assert not stub.asked
    with pytest.raises(
        ConfigError, match=r"^reward\.endpoint\.url=http://127.*wanted an endpoint t"
    ):
        asyncio.run(probed(config_of(stub)))
    monkeypatch.setenv("JUDGE_KEY", KEY)
    with StubJudge(key=KEY) as stub:
        assert asyncio.run(probed(config_of(stub, key_env="JUDGE_KEY")))
        with pytest.raises(ConfigError, match=r"^reward\.endpoint\.key_env=null: .*HTTP 401"):
            asyncio.run(probed(config_of(stub)))


async def probed(config: RewardConfig) -> bool:
    endpoint = Endpoint(config)
    try:
        await endpoint.probe()
    finally:
        await endpoint.close()
    return True


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no address": ({"url": None}, r"url=null: wanted an address that begins with http"),
    "no http": ({"url": "ftp://a/b"}, r"url=ftp://a/b: wanted an address that begins with http"),
    "a port": ({"url": "http://a:b/v1"}, r"url=http://a:b/v1: wanted an address"),
    "a password": (
        {"url": "http://me:pass@a/v1"},
        r"url=http://\*\*\*@a/v1: wanted no user and password: reward\.endpoint\.key_env names",
    ),
    "a password, a port": (
        {"url": "http://me:pass@a:99999/"},
        r"url=http://\*\*\*@a:99999/: wanted an address",
    ),
    "a password, no http": ({"url": "ftp://me:pa@ss/pass@a/"}, r"url=ftp://\*\*\*@a/: wanted an"),
    "a password alone": ({"url": "me:pass@a"}, r"url=\*\*\*@a: wanted an address"),
    "a key": ({"key_env": KEY}, r"key_env=\*\*\*: wanted the name of an environment variable"),
    "no model": ({"model": None}, r"model=null: wanted the judge's model"),
    "no response": ({"template": "{prompt}"}, r"template={prompt}: wanted a text with {response}"),
    "a brace": ({"template": "{response} {"}, r"template=.*: wanted a format string"),
    "no group": ({"score": "Score: .*"}, r"score=.*: wanted an expression with a group"),
    "no expression": ({"score": "(("}, r"score=\(\(: wanted a regular expression"),
    "a range": ({"score_range": [3.0, 1.0]}, r"score_range=.*: wanted two numbers, the lower one"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_settings(name: str) -> None:
    settings, message = REFUSED[name]
    endpoint = {"url": "http://127.0.0.1:1/v1", "model": "m", **settings}
    config = RewardConfig(kind=RewardKind.chat, endpoint=EndpointConfig(**endpoint))
    with pytest.raises(ConfigError, match=rf"^reward\.endpoint\.{message}") as refused:
        config.check("reward")
    assert KEY not in str(refused.value)
    assert "pass" not in str(refused.value).replace("password", "")


CALLS: dict[str, tuple[dict[str, Any], str]] = {
    "no batch": (
        {"kind": RewardKind.chat, "call": RewardCall.batch},
        "call=batch: wanted sample or group, for chat",
    ),
    "exact": (
        {"kind": RewardKind.exact, "call": RewardCall.group},
        "call=group: wanted sample, for reward.kind=exact",
    ),
    "waits": (
        {"kind": RewardKind.math, "waits": True},
        "waits=True: wanted null, for reward.kind=math",
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_wrong_calls(name: str) -> None:
    settings, message = CALLS[name]
    endpoint = EndpointConfig(url="http://127.0.0.1:1/v1", model="m")
    with pytest.raises(ConfigError, match=rf"^reward\.{message}"):
        RewardConfig(**settings, endpoint=endpoint).check("reward")
