"""Tinker's SDK against the server: each public method works, or is refused by a line that names it.

The list of docs/serve.md is made of `METHODS`.
"""

import math
import pickle
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from serve_backends import INFO, FakeBackend

from hybridrl.config import ServeConfig
from hybridrl.serving.requests import CreateModel, ForwardBackward, OptimStep, SampleRequest
from hybridrl.serving.server import Server, in_thread, listener

pytestmark = [pytest.mark.tinker, pytest.mark.filterwarnings("ignore::FutureWarning")]
tinker = pytest.importorskip("tinker")  # in its own environment
types = tinker.types
KEY = "tml-" + "0" * 32
PAGE = Path(__file__).parents[2] / "docs" / "serve.md"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A directory with a tokenizer of three words: the name of the base model."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("base")
    words = Tokenizer(WordLevel({"a": 0, "b": 1, "c": 2}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="a").save_pretrained(folder)
    return str(folder)


@pytest.fixture
def backend(base: str) -> FakeBackend:
    return FakeBackend(replace(INFO, name=base, tokenizer_path=base))


@pytest.fixture
def server(backend: FakeBackend) -> Iterator[Server]:
    address = ServeConfig(port=0)
    with in_thread(address, backend, KEY, listener(address)) as server:
        yield server


@pytest.fixture
def clients(server: Server, base: str) -> Any:
    """A client of each kind, and a checkpoint of each."""
    service = tinker.ServiceClient(base_url=server.url, api_key=KEY)
    training = settle(service.create_lora_training_client(base_model=base, rank=8))
    return SimpleNamespace(
        base=base,
        service=service,
        training=training,
        sampling=settle(service.create_sampling_client(base_model=base)),
        rest=service.create_rest_client(),
        weights=training.save_state("start").result().path,
        sampler_weights=training.save_weights_for_sampler("start").result().path,
        session=service.holder.get_session_id(),
    )


def settle(value: Any) -> Any:
    """What a method returns, or what the future that it returns becomes."""
    return value.result() if hasattr(value, "result") else value


def data(*lengths: int) -> list[Any]:
    return [
        types.Datum(
            model_input=types.ModelInput.from_ints(list(range(n))),
            loss_fn_inputs={
                "target_tokens": types.TensorData(
                    data=list(range(1, n + 1)), dtype="int64", shape=[n]
                ),
                "weights": types.TensorData(data=[1.0] * n, dtype="float32", shape=[n]),
            },
        )
        for n in lengths
    ]


def custom(data: list[Any], logprobs: list[Any]) -> tuple[Any, dict[str, float]]:
    return sum(each.sum() for each in logprobs), {"own:sum": 1.0}


def per_datum(logprobs: Any, weights: Any) -> tuple[Any, dict[str, Any]]:
    return -(logprobs * weights).sum(), {}


PROMPT = types.ModelInput.from_ints([1, 2, 3])
PARAMS = types.SamplingParams(max_tokens=2)
NO_ROUTE = "hybridrl serve has no such route"
CONSOLE = "an address of Tinker's own console, which does not know this server"

Case = tuple[Callable[[Any], Any], str | None, str]
"""A call, the line that it is refused by or None, and a note for the table."""
METHODS: dict[str, dict[str, Case]] = {
    "ServiceClient": {
        "create_lora_training_client": (
            lambda c: c.service.create_lora_training_client(base_model=c.base, rank=8),
            None,
            "the rank of the server; no adapter on the unembedding",
        ),
        "create_training_client_from_state": (
            lambda c: c.service.create_training_client_from_state(c.weights),
            None,
            "",
        ),
        "create_training_client_from_state_with_optimizer": (
            lambda c: c.service.create_training_client_from_state_with_optimizer(c.weights),
            None,
            "",
        ),
        "create_sampling_client": (
            lambda c: c.service.create_sampling_client(model_path=c.sampler_weights),
            None,
            "",
        ),
        "create_rest_client": (lambda c: c.service.create_rest_client(), None, ""),
        "create_custom_loss": (
            lambda c: c.service.create_custom_loss(per_datum, {"logprobs": 1, "weights": 1}),
            None,
            "the client computes it",
        ),
        "get_server_capabilities": (lambda c: c.service.get_server_capabilities(), None, ""),
        "get_telemetry": (lambda c: c.service.get_telemetry(), None, "the server keeps none"),
        "get_console_url": (lambda c: c.service.get_console_url(), None, CONSOLE),
        "copy_weights": (lambda c: in_project(c.service).copy_weights(c.weights), NO_ROUTE, ""),
        "close": (
            lambda c: c.service.close("success"),
            None,
            "frees the models; wait for its result",
        ),
    },
    "TrainingClient": {
        "forward": (lambda c: c.training.forward(data(3), "cross_entropy"), None, ""),
        "forward_backward": (
            lambda c: c.training.forward_backward(data(3, 2), "cross_entropy"),
            None,
            "",
        ),
        "forward_backward_custom": (
            lambda c: c.training.forward_backward_custom(data(3), custom),
            None,
            "the client computes the loss, in two calls",
        ),
        "optim_step": (
            lambda c: c.training.optim_step(types.AdamParams(learning_rate=0.1)),
            None,
            "AdamW",
        ),
        "save_state": (lambda c: c.training.save_state("one"), None, "`user_metadata` is not kept"),
        "save_weights_for_sampler": (
            lambda c: c.training.save_weights_for_sampler("one"),
            None,
            "`user_metadata` is not kept",
        ),
        "save_weights_external": (
            lambda c: c.training.save_weights_external("one"),
            "save_weights_external: not served",
            "`save_state` has the adapter in peft's format",
        ),
        "save_weights_and_get_sampling_client": (
            lambda c: c.training.save_weights_and_get_sampling_client(),
            None,
            "kind `inflight` is a snapshot",
        ),
        "load_state": (lambda c: c.training.load_state(c.weights), None, ""),
        "load_state_with_optimizer": (
            lambda c: c.training.load_state_with_optimizer(c.weights),
            None,
            "",
        ),
        "create_sampling_client": (
            lambda c: c.training.create_sampling_client(c.sampler_weights),
            None,
            "",
        ),
        "get_info": (lambda c: c.training.get_info(), None, ""),
        "get_tokenizer": (lambda c: c.training.get_tokenizer(), None, ""),
        "get_telemetry": (lambda c: c.training.get_telemetry(), None, "the server keeps none"),
        "get_console_url": (lambda c: c.training.get_console_url(), None, CONSOLE),
    },
    "SamplingClient": {
        "sample": (
            lambda c: c.sampling.sample(PROMPT, 2, PARAMS),
            None,
            "without `prompt_alt_tokens_k`",
        ),
        "compute_logprobs": (lambda c: c.sampling.compute_logprobs(PROMPT), None, ""),
        "create": (
            lambda c: tinker.SamplingClient.create(c.service.holder, model_path=c.sampler_weights),
            None,
            "",
        ),
        "get_sampler_handle": (lambda c: c.sampling.get_sampler_handle(), None, ""),
        "from_sampler_handle": (
            lambda c: tinker.SamplingClient.from_sampler_handle(
                c.sampling.get_sampler_handle(), api_key=KEY
            ).sample(PROMPT, 1, PARAMS),
            None,
            "a copy draws other samples, by a number that is random",
        ),
        "get_base_model": (lambda c: c.sampling.get_base_model(), None, ""),
        "get_tokenizer": (
            lambda c: c.sampling.get_tokenizer(),
            None,
            "by the base model's name",
        ),
        "get_telemetry": (lambda c: c.sampling.get_telemetry(), None, "the server keeps none"),
        "on_queue_state_change": (
            lambda c: c.sampling.on_queue_state_change(
                tinker.lib.api_future_impl.QueueState.ACTIVE, None
            ),
            None,
            "",
        ),
    },
    "RestClient": {
        "get_server_capabilities": (lambda c: c.rest.get_server_capabilities(), None, ""),
        "get_training_run": (
            lambda c: c.rest.get_training_run(c.training.model_id),
            None,
            "",
        ),
        "get_training_run_by_tinker_path": (
            lambda c: c.rest.get_training_run_by_tinker_path(c.weights),
            None,
            "",
        ),
        "get_weights_info_by_tinker_path": (
            lambda c: c.rest.get_weights_info_by_tinker_path(c.weights),
            None,
            "",
        ),
        "list_training_runs": (lambda c: c.rest.list_training_runs(), None, ""),
        "list_checkpoints": (
            lambda c: c.rest.list_checkpoints(c.training.model_id),
            None,
            "",
        ),
        "list_user_checkpoints": (lambda c: c.rest.list_user_checkpoints(), None, ""),
        "delete_checkpoint": (
            lambda c: c.rest.delete_checkpoint(c.training.model_id, "weights/start"),
            None,
            "",
        ),
        "delete_checkpoint_from_tinker_path": (
            lambda c: c.rest.delete_checkpoint_from_tinker_path(c.weights),
            None,
            "",
        ),
        "set_checkpoint_ttl_from_tinker_path": (
            lambda c: c.rest.set_checkpoint_ttl_from_tinker_path(c.weights, 3600),
            None,
            "",
        ),
        "get_session": (lambda c: c.rest.get_session(c.session), None, ""),
        "list_sessions": (lambda c: c.rest.list_sessions(), None, ""),
        "get_sampler": (
            lambda c: c.rest.get_sampler(c.sampling._sampling_session_id),
            None,
            "",
        ),
        "get_telemetry": (lambda c: c.rest.get_telemetry(), None, "the server keeps none"),
        "whoami": (lambda c: c.rest.whoami(), "whoami requires JWT auth", "there is one key"),
        "copy_weights": (
            lambda c: c.rest.copy_weights(c.weights, destination_project_id="project"),
            NO_ROUTE,
            "",
        ),
        "get_external_weights_urls": (
            lambda c: c.rest.get_external_weights_urls(
                f"tinker://{c.session}:train:0/external_weights/one"
            ),
            NO_ROUTE,
            "",
        ),
        "get_checkpoint_archive_url": (
            lambda c: c.rest.get_checkpoint_archive_url(c.training.model_id, "weights/start"),
            NO_ROUTE,
            "the files are in the run's directory",
        ),
        "get_checkpoint_archive_url_from_tinker_path": (
            lambda c: c.rest.get_checkpoint_archive_url_from_tinker_path(c.weights),
            NO_ROUTE,
            "the files are in the run's directory",
        ),
        "publish_checkpoint_from_tinker_path": (
            lambda c: c.rest.publish_checkpoint_from_tinker_path(c.weights),
            NO_ROUTE,
            "",
        ),
        "unpublish_checkpoint_from_tinker_path": (
            lambda c: c.rest.unpublish_checkpoint_from_tinker_path(c.weights),
            NO_ROUTE,
            "",
        ),
        "assign_session_project": (
            lambda c: c.rest.assign_session_project(c.session, "project"),
            NO_ROUTE,
            "",
        ),
        "export_session_trace": (
            lambda c: c.rest.export_session_trace(c.session),
            NO_ROUTE,
            "",
        ),
        "search_sessions": (
            lambda c: c.rest.search_sessions(
                types.SessionSearchRequest(owner=types.AccessibleSearchOwner())
            ),
            NO_ROUTE,
            "",
        ),
        "get_audit_log": (lambda c: c.rest.get_audit_log(), NO_ROUTE, ""),
        "get_billing_usage": (lambda c: billing(c.rest), NO_ROUTE, ""),
        "get_current_checkpoint_storage_usage": (
            lambda c: c.rest.get_current_checkpoint_storage_usage(),
            NO_ROUTE,
            "",
        ),
    },
}


def in_project(service: Any) -> Any:
    """The client with a project, which the SDK wants before it asks a server to copy."""
    service._project_id = "project"
    return service


def billing(rest: Any) -> Any:
    from datetime import UTC, datetime

    return rest.get_billing_usage(
        starting_on=datetime(2026, 1, 1, tzinfo=UTC), ending_before=datetime(2026, 1, 2, tzinfo=UTC)
    )


def client_class(name: str) -> Any:
    from tinker.lib.public_interfaces import rest_client

    return rest_client.RestClient if name == "RestClient" else getattr(tinker, name)


def public_methods(name: str) -> set[str]:
    """The methods of a client, those with a twin `NAME_async` by one name."""
    kind = client_class(name)
    names = {key for key in dir(kind) if key[0] != "_" and callable(getattr(kind, key))}
    return {key.removesuffix("_async") for key in names}


@pytest.mark.parametrize("client", METHODS)
def test_every_public_method_is_listed(client: str) -> None:
    """All methods of the newest SDK, and no other but those of 0.25."""
    listed, there = set(METHODS[client]), public_methods(client)
    assert there <= listed
    if tinker.__version__ != "0.25.0":
        assert listed - there <= {key for key in listed if "archive" in key}


@pytest.mark.parametrize(
    ("client", "method"),
    [(client, method) for client, methods in METHODS.items() for method in methods],
)
def test_a_method_works_or_is_refused_by_a_line_that_names_it(
    client: str, method: str, clients: Any
) -> None:
    if method not in public_methods(client):
        pytest.skip(f"tinker {tinker.__version__} has no {client}.{method}")
    call, line, _ = METHODS[client][method]
    if line is None:
        settle(call(clients))
        return
    with pytest.raises(Exception, match=re.escape(line)) as refused:
        settle(call(clients))
    assert "\n" not in str(refused.value)


def method_list() -> str:
    """The list of the page: the methods of each client, by what is said of them."""
    lines: list[str] = []
    for client, methods in METHODS.items():
        told: dict[str, list[str]] = {}
        for method, (_, line, note) in methods.items():
            outcome = "refused" if line else "works"
            told.setdefault(f"{outcome}; {note}" if note else outcome, []).append(f"`{method}`")
        lines += [f"- {client} {', '.join(names)}: {said}" for said, names in told.items()]
    return "\n".join(lines)


def test_the_list_of_the_page_is_made_of_these() -> None:
    """To make it anew, here: `python -c 'import test_sdk; print(test_sdk.method_list())'`."""
    assert method_list() in PAGE.read_text()


def test_numbers_that_are_not_finite(clients: Any, backend: FakeBackend) -> None:
    """An answer brings them; the SDK writes null for one that a client sends."""
    backend.metrics = {"grad_norm": math.nan, "largest": math.inf}
    metrics = clients.training.optim_step(types.AdamParams()).result().metrics
    assert math.isnan(metrics["grad_norm"])
    assert metrics["largest"] == math.inf
    for key in ("learning_rate", "beta2"):
        step = clients.training.optim_step(types.AdamParams(**{key: math.nan}))
        with pytest.raises(tinker.TinkerError, match=f"{key}=null: wanted a number"):
            step.result()


def test_a_loop_of_a_clients_own(clients: Any, backend: FakeBackend) -> None:
    """What it trains on and draws is what the backend is asked for, in the order of the calls."""
    backend.asked.clear()
    first = clients.training.forward_backward(data(3, 5), "ppo", {"clip_low_threshold": 0.9})
    step = clients.training.optim_step(types.AdamParams(learning_rate=0.25, beta2=0.5))
    output = first.result()
    assert step.result().metrics == {"lr": 0.25}
    np.testing.assert_allclose(
        output.loss_fn_outputs[1]["logprobs"].data, -np.arange(1, 6) / 100, rtol=1e-6
    )
    assert output.metrics["loss:sum"] == pytest.approx(0.21)
    sampler = settle(clients.training.save_weights_and_get_sampling_client())
    prompt = types.ModelInput.from_ints([3, 4])
    params = types.SamplingParams(max_tokens=3, seed=5, stop=["x"], temperature=0.5)
    responses = sampler.sample(prompt, 2, params).result().sequences
    assert [len(each.tokens) for each in responses] == [3, 3]
    assert sampler.compute_logprobs(prompt).result() == [None, pytest.approx(-0.04)]
    forward, optim, save, drawn, scored = backend.asked
    assert isinstance(forward, ForwardBackward)
    assert (forward.loss, forward.settings) == ("ppo", {"clip_low_threshold": 0.9})
    assert [d.targets.tolist() for d in forward.data] == [[1, 2, 3], [1, 2, 3, 4, 5]]
    assert isinstance(optim, OptimStep)
    assert (optim.lr, optim.beta2, optim.eps) == (0.25, 0.5, 1e-12)
    assert isinstance(drawn, SampleRequest)
    assert drawn.weights == f"tinker://{save.model}/sampler_weights/{save.name}"
    assert (drawn.count, drawn.settings.seed, drawn.settings.stop_texts) == (2, 5, ("x",))
    assert scored.prompt_logprobs
    assert (drawn.key, scored.key) == ((1, 0), (1, 1))


def test_a_refused_loss_does_not_stop_the_next_call(clients: Any) -> None:
    """The SDK has counted the request by then: a gap would let the next one wait for ever."""
    with pytest.raises(Exception, match="loss_fn=wrong: wanted cross_entropy"):
        clients.training.forward_backward(data(2), "wrong").result(20)
    again = clients.training.forward_backward(data(2), "cross_entropy").result(20)
    assert again.metrics["loss:sum"] == pytest.approx(0.03)


def test_chunks_of_a_large_batch_run_in_order(
    clients: Any, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first chunk is sent last."""
    holder = clients.service.holder
    config = holder._client_config.model_copy(update={"fwdbwd_max_chunk_len": 2})
    monkeypatch.setattr(holder, "_client_config", config)
    backend.asked.clear()
    lengths = [1, 2, 3, 4, 5, 6, 7]
    output = clients.training.forward_backward(data(*lengths), "cross_entropy").result()
    sent = [[len(d.tokens) for d in fb.data] for fb in backend.of_model(ForwardBackward)]
    assert sent == [[1, 2], [3, 4], [5, 6], [7]]
    assert [len(each["logprobs"].data) for each in output.loss_fn_outputs] == lengths


def test_a_model_goes_on_from_a_checkpoint(clients: Any, backend: FakeBackend) -> None:
    """SDK 0.25 makes a model and loads into it; later ones name it themselves."""
    backend.asked.clear()
    again = settle(
        clients.service.create_training_client_from_state_with_optimizer(clients.weights)
    )
    assert again.model_id == f"{clients.session}:train:1"
    assert again.optim_step(types.AdamParams()).result().metrics == {"lr": 1e-4}
    created = backend.of_model(CreateModel)[0]
    if tinker.__version__ != "0.25.0":
        assert (created.source, created.optimizer) == (clients.weights, True)
    with pytest.raises(Exception, match="no checkpoint of that name"):
        settle(clients.service.create_training_client_from_state(clients.weights + "x"))


def test_a_sampling_client_crosses_processes(clients: Any, backend: FakeBackend) -> None:
    backend.asked.clear()
    copy = pickle.loads(pickle.dumps(clients.sampling))
    assert copy.sample(PROMPT, 1, PARAMS).result().sequences[0].stop_reason == "length"
    clients.sampling.sample(PROMPT, 1, PARAMS).result()
    first, second = backend.of_model(SampleRequest)
    assert first.key[0] == second.key[0]
    assert first.key[1] >= 1_000_000_000 > second.key[1]


def test_a_wrong_key_is_an_error_at_once(server: Server) -> None:
    with pytest.raises(Exception, match="not the key of this server"):
        tinker.ServiceClient(base_url=server.url, api_key="tml-" + "1" * 32).create_rest_client()


def test_what_is_listed_is_what_was_saved(clients: Any) -> None:
    run = clients.rest.get_training_run_by_tinker_path(clients.weights).result()
    assert (run.training_run_id, run.lora_rank) == (clients.training.model_id, 8)
    assert run.last_checkpoint.tinker_path == clients.weights
    assert run.last_sampler_checkpoint.tinker_path == clients.sampler_weights
    listed = clients.rest.list_user_checkpoints(limit=1, offset=1).result()
    assert [each.tinker_path for each in listed.checkpoints] == [clients.weights]
    assert listed.cursor.total_count == 2
    clients.rest.set_checkpoint_ttl_from_tinker_path(clients.weights, 3600).result()
    of_model = clients.rest.list_checkpoints(clients.training.model_id).result().checkpoints
    assert [each.expires_at is None for each in of_model] == [False, True]
    clients.rest.delete_checkpoint_from_tinker_path(clients.weights).result()
    with pytest.raises(Exception, match="no checkpoint of that name"):
        clients.rest.delete_checkpoint_from_tinker_path(clients.weights).result()


@pytest.mark.skipif(tinker.__version__ == "0.25.0", reason="0.25 names no tokens")
def test_named_and_likeliest_tokens(clients: Any) -> None:
    """Named tokens come back in the layout that they were asked in."""
    ids = np.asarray([[5, -1], [-1, 7]])
    dense = types.TensorData(data=ids.ravel().tolist(), dtype="int64", shape=[2, 2])
    sparse = types.TensorData(
        data=[5, 7],
        dtype="int64",
        shape=[2, 2],
        sparse_crow_indices=[0, 1, 2],
        sparse_col_indices=[0, 1],
    )
    for named, wanted in ((dense, [-0.05, 0, 0, -0.07]), (sparse, [-0.05, -0.07])):
        got = clients.sampling.sample(
            PROMPT,
            1,
            PARAMS,
            include_prompt_logprobs=True,
            topk_prompt_logprobs=2,
            topk_sample_logprobs=1,
            target_prompt_logprobs=named,
            prompt_logprobs_last_n=1,
        ).result()
        np.testing.assert_allclose(got.target_prompt_logprobs.data, wanted, rtol=1e-6)
        assert got.target_prompt_logprobs.sparse_crow_indices == named.sparse_crow_indices
        assert got.prompt_logprobs == [None, None, pytest.approx(-0.03)]
        assert got.topk_prompt_logprobs == [None, None, [(0, 0.0), (1, pytest.approx(-0.01))]]
        assert got.sequences[0].topk_logprobs == [[(0, -0.5)]] * 2
