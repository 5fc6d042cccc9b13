"""Our protobuf beside the SDK's own: what it writes we read, and it reads what we write."""

from typing import Any

import numpy as np
import pytest

from hybridrl.serving import wire
from hybridrl.serving.requests import (
    LikeliestTokens,
    LossOutputs,
    Refused,
    SampledResponse,
    Samples,
    ServedModel,
)

pytestmark = pytest.mark.tinker
tinker = pytest.importorskip("tinker")  # in its own environment
INFO = ServedModel("m", "m", max_tokens=100, lora_rank=8, vocab=1000)


def sdk_bytes(data: list[Any], **facts: Any) -> bytes:
    """A request in the SDK's own bytes."""
    from tinker.proto.request_conv import forward_backward_request_to_proto

    fb = tinker.types.ForwardBackwardInput(
        data=data, loss_fn="ppo", loss_fn_config=facts.pop("settings", None)
    )
    request = tinker.types.ForwardBackwardRequest(
        forward_backward_input=fb, model_id="s:train:0", seq_id=7
    )
    message = forward_backward_request_to_proto(request)
    message.forward_only = facts.pop("forward_only", False)
    return message.SerializeToString()


def tensor(array: np.ndarray) -> Any:
    kind = "int64" if array.dtype.kind == "i" else "float32"
    return tinker.types.TensorData(data=array.ravel().tolist(), dtype=kind, shape=list(array.shape))


def sparse(array: np.ndarray) -> Any:
    """An array in the SDK's CSR form, of its cells that are not 0."""
    rows, columns = np.nonzero(array)
    starts = np.searchsorted(rows, np.arange(len(array) + 1))
    return tinker.types.TensorData(
        data=array[rows, columns].tolist(),
        dtype="int64" if array.dtype.kind == "i" else "float32",
        shape=list(array.shape),
        sparse_crow_indices=starts.tolist(),
        sparse_col_indices=columns.tolist(),
    )


def datum(tokens: np.ndarray, **inputs: Any) -> Any:
    return tinker.types.Datum(
        model_input=tinker.types.ModelInput.from_ints(tokens.tolist()), loss_fn_inputs=inputs
    )


def read(body: bytes) -> Any:
    return wire.read_forward_backward(wire.parse("ForwardBackwardRequest", body), INFO)


@pytest.mark.parametrize("seed", range(3))
def test_requests_of_the_sdk_are_read(seed: int) -> None:
    """Dense and sparse tensors, [N] and [N, K], with the settings of the loss."""
    rng = np.random.default_rng(seed)
    n, k = rng.integers(1, 50), rng.integers(1, 5)
    tokens, flat = rng.integers(0, 1000, (2, n))
    wide = rng.integers(0, 1000, (n, k)) * (rng.random((n, k)) < 0.5)
    weights = rng.normal(size=(n, k)).astype(np.float32) * (wide > 0)
    body = sdk_bytes(
        [
            datum(tokens, target_tokens=tensor(flat), weights=tensor(weights[:, 0])),
            datum(tokens, target_tokens=tensor(wide), weights=tensor(weights)),
            datum(tokens, target_tokens=sparse(wide), weights=sparse(weights)),
        ],
        settings={"clip_low_threshold": 0.7},
        forward_only=seed == 1,
    )
    request = read(body)
    assert (request.model, request.loss, request.backward) == ("s:train:0", "ppo", seed != 1)
    assert request.settings == {"clip_low_threshold": 0.7}
    assert [d.targets.dtype for d in request.data] == [np.int32] * 3
    np.testing.assert_array_equal(request.data[0].tokens, tokens)
    np.testing.assert_array_equal(request.data[0].targets, flat)
    np.testing.assert_array_equal(request.data[0].inputs["weights"], weights[:, 0])
    for each in request.data[1:]:
        np.testing.assert_array_equal(each.targets, wide)
        np.testing.assert_array_equal(each.inputs["weights"], weights)


def test_fields_that_are_new_are_passed_over() -> None:
    body = sdk_bytes([datum(np.arange(3), target_tokens=tensor(np.arange(3)))])
    later = body + bytes([99 << 3 & 127 | 128 | 2, 99 << 3 >> 7]) + b"\x03abc"  # field 99, a text
    assert len(read(later).data) == len(read(body).data) == 1


def test_outputs_are_read_by_the_sdk() -> None:
    """Data of two widths are two records."""
    from tinker.proto.response_conv import deserialize_forward_backward_output

    rng = np.random.default_rng(0)
    shapes = [(3,), (0,), (5,), (4, 2), (1, 2), (6,)]
    arrays = [rng.normal(size=shape).astype(np.float32) for shape in shapes]
    got = deserialize_forward_backward_output(
        wire.write_outputs(LossOutputs(arrays, {"loss:sum": 1.25, "kl:mean": -0.5}))
    )
    assert got.metrics == {"loss:sum": 1.25, "kl:mean": -0.5}
    assert len(got.loss_fn_outputs) == len(arrays)
    for output, array in zip(got.loss_fn_outputs, arrays, strict=True):
        assert output["logprobs"].shape == list(array.shape)
        np.testing.assert_array_equal(np.reshape(output["logprobs"].data, array.shape), array)


def test_samples_are_read_by_the_sdk() -> None:
    from tinker.proto.response_conv import deserialize_sample_response

    ids = np.asarray([[0, 0], [5, 6], [7, 0]], np.int32)
    scores = np.asarray([[-99999, -99999], [-1, -2], [-3, -99999]], np.float32)
    logprobs = np.asarray([-0.5, -0.25], np.float32)
    sequences = (
        SampledResponse(np.asarray([3, 4], np.int32), logprobs, "stop"),
        SampledResponse(np.asarray([3, 4], np.int32), logprobs, "length"),
    )
    prompt = np.asarray([np.nan, -1, -2], np.float32)
    got = deserialize_sample_response(
        wire.write_samples(Samples(sequences, prompt, LikeliestTokens(ids, scores)))
    )
    assert [s.stop_reason for s in got.sequences] == ["stop", "length"]
    assert got.sequences[0].tokens == [3, 4]
    assert got.sequences[0].logprobs == [-0.5, -0.25]
    assert got.prompt_logprobs == [None, -1.0, -2.0]
    assert got.topk_prompt_logprobs == [None, [(5, -1.0), (6, -2.0)], [(7, -3.0)]]


@pytest.mark.parametrize(
    ("build", "line"),
    [
        (lambda: datum(np.arange(3)), "no target_tokens"),
        (lambda: datum(np.arange(0), target_tokens=tensor(np.arange(0))), "0 tokens, wanted 1"),
        (
            lambda: datum(np.arange(101), target_tokens=tensor(np.arange(101))),
            r"101 tokens, wanted 1 to 100 \(data.max_prompt_tokens plus",
        ),
        (
            lambda: datum(np.arange(3), target_tokens=tensor(np.arange(2))),
            r"target_tokens: shape \[2\]",
        ),
        (
            lambda: datum(np.asarray([1, 1000]), target_tokens=tensor(np.arange(2))),
            "model_input: token 1000, wanted 0 to 999",
        ),
        (
            lambda: datum(np.arange(2), target_tokens=tensor(np.asarray([0, -1]))),
            "target_tokens: token -1",
        ),
        (
            lambda: datum(np.arange(2), target_tokens=tensor(np.asarray([0.0, 1.0], np.float32))),
            "target_tokens: float32, wanted integers",
        ),
        (
            lambda: datum(
                np.arange(2),
                target_tokens=tensor(np.arange(2)),
                weights=tensor(np.asarray([1, np.nan], np.float32)),
            ),
            "weights: a value is not finite",
        ),
        (
            lambda: datum(
                np.arange(2),
                target_tokens=tinker.types.TensorData(
                    data=[1],
                    dtype="int64",
                    shape=[2, 1 << 40],
                    sparse_crow_indices=[0, 1, 1],
                    sparse_col_indices=[0],
                ),
            ),
            "tensors of 2199023255552 elements",
        ),
        (
            lambda: datum(
                np.arange(2),
                target_tokens=tinker.types.TensorData(
                    data=[1],
                    dtype="int64",
                    shape=[2, 3],
                    sparse_crow_indices=[0, 1, 1],
                    sparse_col_indices=[3],
                ),
            ),
            "a column is out of it",
        ),
    ],
)
def test_a_wrong_datum_is_refused_by_one_line(build: Any, line: str) -> None:
    with pytest.raises(Refused, match=line) as refused:
        read(sdk_bytes([build()]))
    assert "\n" not in str(refused.value)
    assert str(refused.value).startswith(("data[0]", "a sparse", "tensors"))


def test_a_body_that_is_none_is_refused() -> None:
    with pytest.raises(Refused, match="the body is no ForwardBackwardRequest"):
        wire.parse("ForwardBackwardRequest", b"\xff\xff\xff")


@pytest.mark.parametrize("seq", [1, 127, 128, 70_000])
def test_the_beginning_of_a_body_tells_whose_it_is(seq: int) -> None:
    body = sdk_bytes([datum(np.arange(90), target_tokens=tensor(np.arange(90)))])
    head = wire.MESSAGES["ForwardBackwardRequest"](model_id="s:train:0", seq_id=seq)
    written = head.SerializeToString()
    assert wire.numbers_of(body[:60]) == ("s:train:0", 7)
    assert wire.numbers_of(written + b"\x1a\xff") == ("s:train:0", seq)
    assert wire.numbers_of(b"\x12\x00" + body) is None
    assert wire.numbers_of(b"\x0a\x02\xff\xff\x10\x01") is None  # a name that is no text
