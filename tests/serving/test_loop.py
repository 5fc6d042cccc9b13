"""The loop of a server, straight against `Backend.submit`, on ranks of a tiny model."""

import asyncio
import errno
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import wraps
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from served_loops import ADAM, Client, folder_of, ids, serving, shifted

from hybridrl.config import Config
from hybridrl.serving.loop import ServeLoop
from hybridrl.serving.requests import (
    CreateModel,
    Datum,
    DropSamples,
    ForwardBackward,
    LoadModel,
    OptimStep,
    Refused,
)
from hybridrl.serving.sampling import ClientSampling
from hybridrl.workers.serving import ServingWorker

pytestmark = pytest.mark.long

ONE_RANK = ["cluster=processes", "cluster.ranks=1", "data.max_prompt_tokens=24"]
ADAPTERS = [*ONE_RANK, "actor.lora.rank=4", "serve.snapshots=3", "serve.patience_s=0"]
TOKENS = [5, 6, 7, 8, 9, 10, 11]


@pytest.fixture(scope="module")
def loop(
    make_config: Callable[..., Config],
    tiny_run: list[str],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[ServeLoop]:
    """A server of adapters on one rank, which is this process."""
    folder = tmp_path_factory.mktemp("served") / "run"
    with serving(make_config(*tiny_run, *ADAPTERS, f"run.dir={folder}")) as loop:
        yield loop


@pytest.fixture
def client(loop: ServeLoop, request: pytest.FixtureRequest) -> Iterator[Client]:
    """A client whose model has adapters that are not zero."""
    client = Client(loop, f"{request.node.name.partition('[')[0]}:train:0")
    client.create(seed=3)
    client.gradient([shifted(TOKENS, weights=[1] * 6)], "cross_entropy")
    client.step()
    yield client
    client.unload()


def test_forward_and_sampling_agree(client: Client) -> None:
    """In log-probabilities of what was sampled, and of the prompt that it was sampled after."""
    path = client.save("now")
    samples = client.sample(path, TOKENS[:3], 2, max_tokens=8, prompt_logprobs=True)
    for sequence in samples.sequences:
        whole = [*TOKENS[:3], *sequence.tokens.tolist()]
        data = [shifted(whole, weights=[1] * (len(whole) - 1))]
        (own,) = client.gradient(data, "cross_entropy", backward=False).logprobs
        np.testing.assert_allclose(own[2:], sequence.logprobs, rtol=0, atol=1e-5)
        assert samples.prompt_logprobs is not None
        assert np.isnan(samples.prompt_logprobs[0])
        np.testing.assert_allclose(own[:2], samples.prompt_logprobs[1:], rtol=0, atol=1e-5)


def test_forward_and_forward_backward_are_equal_bit_for_bit(client: Client) -> None:
    data = [shifted(TOKENS, weights=[0, 1, 1, 1, 1, 1]), shifted(TOKENS[2:], weights=[1] * 4)]
    first = client.gradient(data, "cross_entropy", backward=False)
    second = client.gradient(data, "cross_entropy")
    for one, other in zip(first.logprobs, second.logprobs, strict=True):
        np.testing.assert_array_equal(one, other)
    assert first.metrics == second.metrics


def test_a_forward_pass_adds_no_gradient(client: Client) -> None:
    data = [shifted(TOKENS, weights=[1] * 6)]
    client.gradient(data, "cross_entropy", backward=False)
    with pytest.raises(Refused, match="no gradient since the last one"):
        client.step()


def test_four_data_have_four_times_the_gradient_of_one(client: Client) -> None:
    """In one call or in several."""
    datum, norms = shifted(TOKENS, weights=[1] * 6), []
    for calls in ([[datum]], [[datum] * 4], [[datum], [datum] * 3]):
        for data in calls:
            client.gradient(data, "cross_entropy")
        norms.append(client.step(lr=0.0)["grad_norm"])
    assert norms[1:] == pytest.approx([4 * norms[0]] * 2, rel=1e-6)


def test_targets_may_be_any_tokens(client: Client) -> None:
    """Targets give one gradient, the next input or not; several of a position add up."""
    tokens, last = ids(TOKENS[:-1]), TOKENS[-1]
    weights = np.ones(6, np.float32)
    plain = Datum(tokens, ids([*TOKENS[1:-1], last]), {"weights": weights})
    other = Datum(tokens, ids([0, *TOKENS[2:-1], last]), {"weights": np.r_[0, weights[1:]]})
    other = Datum(other.tokens, other.targets, {"weights": other.inputs["weights"].astype("f")})
    both = np.stack([plain.targets, other.targets], 1)
    several = Datum(tokens, both, {"weights": np.stack([weights, other.inputs["weights"]], 1)})
    outputs = [client.gradient([one], "cross_entropy") for one in (plain, other, several)]
    np.testing.assert_allclose(outputs[0].logprobs[0][1:], outputs[1].logprobs[0][1:], atol=1e-6)
    assert outputs[2].logprobs[0].shape == (6, 2)
    np.testing.assert_allclose(outputs[2].logprobs[0][:, 0], outputs[0].logprobs[0], atol=1e-6)
    np.testing.assert_allclose(outputs[2].logprobs[0][:, 1], outputs[1].logprobs[0], atol=1e-6)
    sums = [one.metrics["loss:sum"] for one in outputs]
    assert sums[2] == pytest.approx(sums[0] + sums[1], rel=1e-6)
    together = client.step(lr=0.0)["grad_norm"]
    client.gradient([plain, other], "cross_entropy")
    assert 2 * client.step(lr=0.0)["grad_norm"] == pytest.approx(together, rel=1e-5)


def test_an_old_snapshot_keeps_its_weights_and_changes_nothing(client: Client) -> None:
    data, prompt = [shifted(TOKENS, weights=[1] * 6)], TOKENS[:2]
    old = client.save("old")
    before = client.sample(old, prompt, 2, max_tokens=6, seed=1)
    losses = []
    for samples_between in (True, False):
        client.gradient(data, "cross_entropy")
        client.step()
        if samples_between:
            client.sample(old, prompt, max_tokens=3)
        losses.append(client.gradient(data, "cross_entropy", backward=False).metrics["loss:sum"])
    after = client.sample(old, prompt, 2, max_tokens=6, seed=1)
    for one, other in zip(before.sequences, after.sequences, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        np.testing.assert_array_equal(one.logprobs, other.logprobs)
    new = client.sample(client.save("new"), prompt, 2, max_tokens=6, seed=1)
    assert new.sequences[0].logprobs.tolist() != after.sequences[0].logprobs.tolist()
    twin = Client(client.loop, "twin:train:0")  # the same, without samples
    twin.create(seed=3)
    for _ in range(3):
        twin.gradient(data, "cross_entropy")
        twin.step()
    loss = twin.gradient(data, "cross_entropy", backward=False).metrics["loss:sum"]
    assert loss == losses[-1]
    twin.unload()


def test_models_that_take_turns_are_each_as_alone(loop: ServeLoop) -> None:
    """Weights, moments and gradients of each are its own, whatever comes between its calls."""
    data = [shifted(TOKENS, weights=[1] * 6)], [shifted(TOKENS[::-1], weights=[1] * 6)]

    def norms_of(numbers: list[int]) -> dict[int, list[float]]:
        clients = {n: Client(loop, f"turns-{n}:train:0") for n in numbers}
        norms: dict[int, list[float]] = {n: [] for n in numbers}
        for number, client in clients.items():
            client.create(seed=number)
        for _ in range(3):
            for number in numbers * 2:  # two gradients add up
                clients[number].gradient(data[number], "cross_entropy")
            for number in numbers:
                norms[number].append(clients[number].step()["grad_norm"])
        for client in clients.values():
            client.unload()
        return norms

    assert norms_of([0, 1]) == norms_of([0]) | norms_of([1])


def test_draws_are_keyed_by_the_clients_numbers(loop: ServeLoop) -> None:
    """Two clients of the same numbers draw the same; a seed makes them those of a prompt."""
    clients = [Client(loop, number=number) for number in (1, 1, 2)]
    drawn = [one.sample(None, TOKENS[:2], 2, max_tokens=8) for one in clients]
    tokens = [[s.tokens.tolist() for s in one.sequences] for one in drawn]
    assert tokens[0] == tokens[1]
    assert tokens[0][0] != tokens[0][1]
    assert tokens[0] != tokens[2]
    for one in clients[:2]:  # in one batch, where equal keys are of different samples
        one.requests = 0
    asked = [one.request(None, TOKENS[:2], 2, max_tokens=8) for one in clients[:2]]
    at_once: list[Any] = clients[0].ask(*asked)
    assert [[s.tokens.tolist() for s in one.sequences] for one in at_once] == tokens[:2]
    clients[2].requests = 5
    seeded = [one.sample(None, TOKENS[:2], 2, max_tokens=8, seed=5) for one in clients]
    assert len({str([s.tokens.tolist() for s in one.sequences]) for one in seeded}) == 1


def test_samples_that_are_parked_go_on(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training and two snapshots take turns every two steps, and nothing else differs."""
    data = (shifted(TOKENS, weights=[1] * 6),)
    gradient = ForwardBackward(client.model, data, "cross_entropy", {}, True)
    step = OptimStep(client.model, **ADAM)
    paths = [client.save("one"), None]
    requests = [client.request(path, TOKENS[:2], 2, max_tokens=10, seed=4) for path in paths]
    alone: list[Any] = [client.ask(request)[0] for request in requests]
    parked, park = list[int](), ServingWorker._park

    def counted(self: ServingWorker) -> None:
        before = len(self._parked)
        park(self)
        parked.append(len(self._parked) - before)

    monkeypatch.setattr(ServingWorker, "_park", counted)
    _draw_in_short_calls(monkeypatch)
    turns: list[Any] = [gradient, requests[0], step, requests[1], *[gradient, step] * 4]
    answers: list[Any] = client.ask(*turns)
    assert sum(parked) >= 4
    for one, other in zip(alone, (answers[1], answers[3]), strict=True):
        for a, b in zip(one.sequences, other.sequences, strict=True):
            np.testing.assert_array_equal(a.tokens, b.tokens)
            np.testing.assert_allclose(a.logprobs, b.logprobs, rtol=0, atol=1e-6)


def test_a_request_joins_the_batch_that_decodes(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that comes while others of its snapshot decode costs no call of the ranks of its own."""
    loop, path, draw = client.loop, client.save("joined"), ServingWorker.draw
    rows, asked, second = list[int](), list[int](), Future[Any]()
    requests = [
        client.request(path, TOKENS[:2], 2, max_tokens=n, seed=4, eos=False) for n in (12, 4)
    ]

    @wraps(draw)  # with its dispatch
    def counted(self: ServingWorker, *args: Any) -> Any:
        before = self.generator.engine.stats().decode_tokens
        reply = draw(self, *args)
        rows.append(self.generator.engine.stats().decode_tokens - before)
        if not asked:
            asked.append(len(rows))
            loop._inbox.put((requests[1], second))
        return reply

    _draw_in_short_calls(monkeypatch)
    monkeypatch.setattr(ServingWorker, "draw", counted)
    (first,) = client.ask(requests[0])
    assert [len(one.tokens) for one in first.sequences] == [12, 12]
    assert [len(one.tokens) for one in second.result(0).sequences] == [4, 4]
    assert rows == [4, 8, 8, 4, 4, 4]  # of two steps each, as many calls as the first alone


def _draw_in_short_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a call of the ranks make two decode steps."""
    draw = ClientSampling.draw
    monkeypatch.setattr(ClientSampling, "draw", lambda self, one, _: draw(self, one, 2))


def test_samples_of_a_session_that_ends_leave_the_batch(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Samples that decode, and parked ones; a client beside them draws as it does alone."""
    loop, paths = client.loop, [client.save("one"), None]
    left = Client(loop, "left:train:0")
    alone = client.sample(paths[0], TOKENS[:3], max_tokens=10, seed=4, eos=False)
    draw, drop = ServingWorker.draw, ServingWorker.drop_samples
    ended, rows, samples = Future[Any](), list[int](), list[list[int]]()

    def present(worker: ServingWorker) -> list[int]:
        return sorted([len(worker.generator.engine.copy()), *map(len, worker._parked.values())])

    @wraps(draw)  # with its dispatch
    def counted(self: ServingWorker, *args: Any) -> Any:
        before = self.generator.engine.stats().decode_tokens
        reply = draw(self, *args)
        rows.append(self.generator.engine.stats().decode_tokens - before)
        if sum(present(self)) == 5 and not samples:
            samples.append(present(self))
            loop._inbox.put((DropSamples("left", "finished"), ended))
        return reply

    @wraps(drop)
    def dropped(self: ServingWorker, *args: Any) -> Any:
        reply = drop(self, *args)
        samples.append(present(self))
        rows.clear()
        return reply

    monkeypatch.setattr(ServingWorker, "draw", counted)
    monkeypatch.setattr(ServingWorker, "drop_samples", dropped)
    _draw_in_short_calls(monkeypatch)
    requests = [left.request(path, TOKENS[:2], 2, max_tokens=12, eos=False) for path in paths]
    requests.append(client.request(paths[0], TOKENS[:3], max_tokens=10, seed=4, eos=False))

    async def asked() -> list[Any]:
        answers = (loop.submit(request) for request in requests)
        return await asyncio.gather(*answers, return_exceptions=True)

    *gone, kept = asyncio.run(asked())
    assert [str(error) for error in gone] == ["session left: finished"] * 2
    assert ended.result(0)
    assert kept.sequences[0].tokens.tolist() == alone.sequences[0].tokens.tolist()
    assert samples[0] == [2, 3]
    assert sum(samples[1]) == 1
    assert set(rows) <= {1, 2}


def test_each_request_has_settings_of_its_own(loop: ServeLoop) -> None:
    """Together in one batch: greedy, one token, a stop token, a stop text."""
    client = Client(loop, number=7)
    (free,) = client.sample(None, TOKENS[:2], max_tokens=8, seed=2, eos=False).sequences
    tokenizer = _tokenizer(loop)
    text = tokenizer.decode(free.tokens[3:5].tolist())
    requests = [
        client.request(None, TOKENS[:2], max_tokens=8, seed=2, **more)
        for more in (
            {"temperature": 0.0},
            {"top_k": 1},
            {"top_p": 1e-9},
            {"stop_tokens": (int(free.tokens[2]),)},
            {"stop_texts": (text, "never")},
            {"eos": False},
        )
    ]
    answers: list[Any] = client.ask(*requests)
    greedy, top_k, top_p, token, stopped, whole = (x.sequences[0] for x in answers)
    assert greedy.tokens.tolist() == top_k.tokens.tolist() == top_p.tokens.tolist()
    assert token.tokens.tolist() == free.tokens[:3].tolist()
    assert token.stop_reason == "stop"
    assert stopped.tokens.tolist() == free.tokens[:5].tolist()
    assert stopped.stop_reason == "stop"
    assert whole.tokens.tolist() == free.tokens.tolist()
    assert whole.stop_reason == "length"


def test_prompts_are_scored(client: Client) -> None:
    """Likeliest and named tokens, of a prompt alone and of responses."""
    path, prompt = client.save("scored"), TOKENS
    named = np.array([[5, -1], [6, 7], [-1, -1], [0, 1], [2, 3], [4, 5]], np.int32)
    scored = client.sample(
        path, prompt, 0, prompt_logprobs=True, topk_prompt_logprobs=3, named=named
    )
    assert not scored.sequences
    (own,) = client.gradient([shifted(prompt, weights=[1] * 6)], "cross_entropy").logprobs
    np.testing.assert_allclose(scored.prompt_logprobs[1:], own, atol=1e-5)
    targets = np.maximum(named, 0)
    data = [Datum(ids(prompt[:-1]), targets, {"weights": np.ones((6, 2), np.float32)})]
    (other,) = client.gradient(data, "cross_entropy", backward=False).logprobs
    np.testing.assert_allclose(scored.named, np.where(named < 0, 0, other), atol=1e-5)
    assert scored.topk.tokens.shape == (7, 3)
    assert (scored.topk.logprobs[0] == -99999).all()
    assert (np.diff(scored.topk.logprobs[1:], axis=1) <= 0).all()
    drawn = client.sample(path, prompt, 1, max_tokens=4, topk_logprobs=2, temperature=0.0)
    (response,) = drawn.sequences
    np.testing.assert_array_equal(response.topk.tokens[:, 0], response.tokens)
    np.testing.assert_allclose(response.topk.logprobs[:, 0], response.logprobs, atol=1e-5)


def test_a_model_goes_on_from_its_files(client: Client) -> None:
    """With its optimizer as if it had never stopped, and without as from new moments."""
    data = [shifted(TOKENS, weights=[1] * 6)]
    path = client.save("there", "weights", files=True)
    weights_alone = client.save("there", files=True)
    client.gradient(data, "cross_entropy")
    client.step()
    losses = [client.gradient(data, "cross_entropy", backward=False).metrics]
    for source, optimizer in ((path, True), (path, False), (weights_alone, False)):
        other = Client(client.loop, "other:train:0")
        other.create(seed=9, source=source, optimizer=optimizer)
        other.gradient(data, "cross_entropy")
        other.step()
        losses.append(other.gradient(data, "cross_entropy", backward=False).metrics)
        other.unload()
    assert losses[0] == losses[1]
    assert losses[2] == losses[3] != losses[0]
    checkpoint, _ = client.loop.listed(client.model)
    assert (checkpoint.path, checkpoint.rank) == (path, 4)
    assert checkpoint.bytes > 1000


def test_a_saved_model_is_peft_s_and_transformers(client: Client) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    path = client.save("exported", "weights", files=True)
    folder = folder_of(client.loop, path)
    data = [shifted(TOKENS, weights=[1] * 6)]
    (own,) = client.gradient(data, "cross_entropy", backward=False).logprobs
    merged = AutoModelForCausalLM.from_pretrained(folder)
    base = AutoModelForCausalLM.from_pretrained(client.loop.info.tokenizer_path)
    for model in (merged, PeftModel.from_pretrained(base, folder / "adapter")):
        logits = model(torch.tensor([TOKENS[:-1]])).logits[0].log_softmax(-1)
        expected = logits[torch.arange(6), torch.tensor(TOKENS[1:])].detach().numpy()
        np.testing.assert_allclose(own, expected, atol=1e-5)


def test_a_datum_is_as_long_as_the_server_says(client: Client) -> None:
    """Its last target is one token more."""
    most = client.loop.info.max_tokens
    data = [shifted([5] * (most + 1), weights=[1] * most)]
    assert client.gradient(data, "cross_entropy").logprobs[0].shape == (most,)
    client.step()


def test_decoding_is_marked_as_it_goes_on(loop: ServeLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that no call is stuck because its samples are long."""
    marks = list[tuple[str, int]]()
    monkeypatch.setattr("hybridrl.workers.generator.mark", lambda *mark: marks.append(mark))
    monkeypatch.setattr("hybridrl.workers.generator._MARKED_STEPS", 4)
    Client(loop).sample(None, TOKENS[:2], max_tokens=10, eos=False)
    assert marks[:3] == [("admit and decode", 0), ("decode", 4), ("decode", 8)]


def test_files_that_are_damaged_change_nothing(client: Client) -> None:
    """Neither weights nor moments of the model: it goes on as its twin, which loads nothing."""
    path = client.save("damaged", "weights", files=True)
    twin = Client(client.loop, "damaged-twin:train:0")
    twin.ask(CreateModel(twin.model, source=path, optimizer=True))
    state = folder_of(client.loop, path) / "state"
    largest = max(state.iterdir(), key=lambda file: file.stat().st_size)
    for file in (largest, state / ".metadata"):
        whole = file.read_bytes()
        file.write_bytes(whole[: len(whole) // 2])
        for optimizer in (True, False):
            client.gradient([shifted(TOKENS, weights=[1] * 6)], "cross_entropy")
            with pytest.raises(Refused, match=f"^{path} cannot be read: "):
                client.ask(LoadModel(client.model, path, optimizer))
            with pytest.raises(Refused, match="no gradient"):
                client.step()
        file.write_bytes(whole)
    data = [shifted(TOKENS, weights=[1] * 6)]
    losses = []
    for one in (client, twin):
        for _ in range(2):
            one.gradient(data, "cross_entropy")
            one.step()
        losses.append(one.gradient(data, "cross_entropy", backward=False).metrics)
    assert losses[0] == losses[1]
    twin.unload()


def test_adapters_of_other_names_or_shapes_are_refused(client: Client) -> None:
    """Whoever made the file: before a tensor is changed."""
    path = client.save("foreign", "weights", files=True)
    file = folder_of(client.loop, path) / "adapter" / "adapter_model.safetensors"
    own, whole = load_file(file), file.read_bytes()
    name = min(own)
    for adapters, line in (
        ({**own, name: own[name][:, :-1].contiguous()}, "has the shape .*, wanted"),
        ({key: own[key] for key in own if key != name}, "is in the model alone"),
        ({**own, "other": own[name].clone()}, "other is in it alone"),
    ):
        save_file(adapters, file)
        with pytest.raises(Refused, match=f"^{path} cannot be read: .*{line}"):
            client.sample(path, TOKENS[:2], max_tokens=1)
    file.write_bytes(whole[:-8])
    with pytest.raises(Refused, match="cannot be read: SafetensorError"):
        client.sample(path, TOKENS[:2], max_tokens=1)
    file.write_bytes(whole)
    assert client.sample(path, TOKENS[:2], max_tokens=1).sequences


def test_a_full_disk_refuses_a_save(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for module in ("hf", "distributed"):
        with monkeypatch.context() as patched:
            patched.setattr(f"hybridrl.checkpoint.{module}.{WRITERS[module]}", full)
            with pytest.raises(Refused, match=r"full cannot be written: .*No space left on device"):
                client.save("full", "weights", files=True)
    folder = client.loop.run_dir / "models" / client.model
    assert not folder.exists() or not list((folder / "weights").iterdir())
    client.save("full", "weights", files=True)


WRITERS = {"hf": "save_file", "distributed": "note_sum"}


def test_snapshots_beyond_the_bound_go(client: Client) -> None:
    """The least recently sampled one; one with files comes back."""
    prompt = TOKENS[:2]
    paths = [client.save(str(number)) for number in range(2)]
    kept = client.save("kept", files=True)
    first = client.sample(kept, prompt, max_tokens=5, seed=1)
    client.sample(paths[0], prompt, max_tokens=1)
    others = [client.save(f"more{number}") for number in range(2)]
    with pytest.raises(Refused, match=r"1 is gone: serve\.snapshots=3 keeps the last sampled"):
        client.sample(paths[1], prompt, max_tokens=1)
    for path in (paths[0], *others):
        client.sample(path, prompt, max_tokens=1)
    again = client.sample(kept, prompt, max_tokens=5, seed=1)
    np.testing.assert_array_equal(first.sequences[0].tokens, again.sequences[0].tokens)


REFUSED = {
    "stable_reinforce": (r"loss_fn=stable_reinforce .*; set loss_fn=importance_sampling", {}),
    "grpo": (r"loss_fn=grpo: available are cross_entropy, importance_sampling, ppo", {}),
    "ppo": (r"data\[0\]: loss_fn=ppo needs loss_fn_inputs\.logprobs", {}),
    "cross_entropy": (r"loss_fn_config\.beta: settings of cross_entropy are none", {"beta": 1.0}),
    "dro": (r"loss_fn_config\.beta: loss_fn=dro needs it", {}),
    "cispo": (
        r"loss_fn_config\.clip_low_threshold=5\.0: wanted 0 to clip_high_threshold, 4\.0",
        {"clip_low_threshold": 5.0},
    ),
}


@pytest.mark.parametrize("loss", REFUSED)
def test_a_wrong_loss_is_refused_in_one_line(client: Client, loss: str) -> None:
    line, settings = REFUSED[loss]
    with pytest.raises(Refused, match=f"^{line}") as caught:
        client.gradient([shifted(TOKENS, weights=[1] * 6)], loss, **settings)
    assert "\n" not in str(caught.value)
    assert client.gradient([shifted(TOKENS, weights=[1] * 6)], "cross_entropy")


def test_what_cannot_be_is_refused_before_a_rank_sees_it(client: Client) -> None:
    for line, request in {
        "nobody: there is no such model": OptimStep("nobody", 1e-3, 0.9, 0.9, 1e-8, 0, 0),
        ".*there is a model of that name": CreateModel(client.model),
        "tinker://a/weights/b: there is no such checkpoint": CreateModel(
            "other", source="tinker://a/weights/b"
        ),
        "'x': wanted tinker": client.request("x", TOKENS, max_tokens=1),
    }.items():
        with pytest.raises(Refused, match=f"^{line}"):
            client.ask(request)


def _tokenizer(loop: ServeLoop) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(loop.info.tokenizer_path)
