"""The protobuf messages of Tinker's SDK (0.25 to 0.38), read and written without generated code.

The table `FIELDS` has the numbers of the fields that are read or written; others are passed over.
Arrays cross as the raw bytes of their elements, little-endian and row-major.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt
from google.protobuf import descriptor_pb2, descriptor_pool, message, message_factory

from hybridrl.serving.requests import (
    Datum,
    Float32,
    ForwardBackward,
    Int32,
    LikeliestTokens,
    LossOutputs,
    Refused,
    SampledResponse,
    Samples,
    ServedModel,
)

_Array = npt.NDArray[Any]
PACKAGE = "tinker_public"
STOP_REASONS = {"stop": 0, "length": 1}
DTYPES: Mapping[int, np.dtype[Any]] = {1: np.dtype("<f4"), 2: np.dtype("<i8"), 3: np.dtype("<i4")}
FLOAT32 = 1
LARGEST_CELLS = 1 << 26
"""Elements of a request's tensors as dense arrays: a sparse one is small on the wire."""

# Each field by its number: name and kind. A kind is a scalar of protobuf or another message; `*`
# repeats it, `?` tells left out from empty, and `map ` is from texts.
FIELDS: Mapping[str, Mapping[int, str]] = {
    "ForwardBackwardRequest": {
        1: "model_id string",
        2: "seq_id int32",
        3: "data *Datum",
        4: "loss_fn string",
        5: "loss_fn_config map double",
        6: "forward_only bool",
        7: "loss_fn_config_v2 map LossConfigValue",
    },
    "LossConfigValue": {1: "number ?double", 2: "text ?string"},
    "Datum": {1: "model_input *Chunk", 2: "loss_fn_inputs map Tensor"},
    "Chunk": {1: "encoded_text ?EncodedTextChunk"},
    "EncodedTextChunk": {1: "tokens bytes"},
    "Tensor": {1: "dense ?bytes", 2: "sparse_csr ?SparseCsr", 3: "dtype int32", 4: "shape *int64"},
    "SparseCsr": {1: "values bytes", 2: "crow_indices bytes", 3: "col_indices bytes"},
    "BatchedTensor": {
        1: "data bytes",
        2: "offsets bytes",
        3: "dtype int32",
        4: "trailing_shape *int64",
    },
    "ArrayRecord": {1: "type_tag string", 2: "fields map BatchedTensor", 3: "num_datums int64"},
    "ForwardBackwardOutput": {
        1: "loss_fn_output_type string",
        2: "loss_fn_outputs *ArrayRecord",
        3: "metrics map double",
    },
    "SampleResponse": {
        1: "sequences *SampledSequence",
        2: "prompt_logprobs ?bytes",
        3: "topk_prompt_logprobs ?TopkLogprobs",
        5: "target_prompt_logprobs ?Tensor",
    },
    "SampledSequence": {
        1: "stop_reason int32",
        2: "tokens bytes",
        3: "logprobs ?bytes",
        4: "topk_sampled_logprobs ?TopkLogprobs",
    },
    "TopkLogprobs": {1: "token_ids bytes", 2: "logprobs bytes", 3: "k uint32", 4: "length uint32"},
}


def _describe_field(
    owner: descriptor_pb2.DescriptorProto, number: int, name: str, kind: str, *, repeated: bool
) -> descriptor_pb2.FieldDescriptorProto:
    """Add a field to a message's description."""
    field = owner.field.add(name=name, number=number)
    field.label = field.LABEL_REPEATED if repeated else field.LABEL_OPTIONAL
    scalar = getattr(field, f"TYPE_{kind.upper()}", None)
    field.type = field.TYPE_MESSAGE if scalar is None else scalar
    if scalar is None:
        field.type_name = f".{PACKAGE}.{kind}"
    return field


def _messages() -> dict[str, type[message.Message]]:
    """The classes of the messages in `FIELDS`, by name."""
    file = descriptor_pb2.FileDescriptorProto(name="tinker", package=PACKAGE, syntax="proto3")
    for owner, fields in FIELDS.items():
        described = file.message_type.add(name=owner)
        for number, text in fields.items():
            name, *is_map, kind = text.split()
            if is_map:  # a map is a repeated message of key and value
                entry_name = f"{name.title().replace('_', '')}Entry"
                entry = described.nested_type.add(name=entry_name)
                entry.options.map_entry = True
                _describe_field(entry, 1, "key", "string", repeated=False)
                _describe_field(entry, 2, "value", kind, repeated=False)
                _describe_field(described, number, name, f"{owner}.{entry_name}", repeated=True)
                continue
            field = _describe_field(
                described, number, name, kind.lstrip("*?"), repeated=kind[0] == "*"
            )
            if kind[0] == "?":
                field.proto3_optional = True
                field.oneof_index = len(described.oneof_decl)
                described.oneof_decl.add(name=f"_{name}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{PACKAGE}.{name}"))
        for name in FIELDS
    }


MESSAGES = _messages()


def parse(name: str, body: bytes) -> Any:
    """A message from its bytes. Raises Refused where they are none."""
    try:
        return MESSAGES[name].FromString(body)
    except message.DecodeError as error:
        raise Refused(f"the body is no {name} ({error})") from error


def numbers_of(body: bytes) -> tuple[str, int] | None:
    """The model and the number of a ForwardBackwardRequest, from its first bytes.

    The fields stand in the order of their numbers, so the beginning of a body that is too large, or
    broken further on, tells whose number it takes. None where it does not.
    """
    if body[:1] == b"\x0a" and len(body) > 2 and body[1] < 128:  # a text of up to 127 bytes
        rest = body[2 + body[1] :]
        if rest[:1] == b"\x10":
            last = next((i for i, byte in enumerate(rest[1:11], 2) if byte < 128), 0)
            try:
                head = parse("ForwardBackwardRequest", body[: 2 + body[1] + last])
            except Refused:
                return None
            return head.model_id, head.seq_id
    return None


@dataclass(frozen=True, slots=True)
class SparseLayout:
    """The cells of a tensor [rows, columns] that it has: those of each row follow each other.

    `starts` [rows + 1] are the rows' first cells, `columns` [cells] the cells' columns (CSR).
    """

    shape: tuple[int, int]
    starts: npt.NDArray[np.int64]
    columns: npt.NDArray[np.int64]

    def __post_init__(self) -> None:
        rows, columns = self.shape
        starts, cells = self.starts, len(self.columns)
        if (
            len(starts) != rows + 1
            or starts[0] != 0
            or starts[-1] != cells
            or (np.diff(starts) < 0).any()
        ):
            raise Refused(f"a sparse tensor of shape {list(self.shape)}: its rows do not fit")
        if cells and not 0 <= self.columns.min() <= self.columns.max() < columns:
            raise Refused(f"a sparse tensor of shape {list(self.shape)}: a column is out of it")

    @property
    def rows(self) -> npt.NDArray[np.int64]:
        """The row of each cell."""
        return np.repeat(np.arange(self.shape[0]), np.diff(self.starts))

    def dense(self, values: _Array, fill: int) -> _Array:
        """The tensor with `fill` where it has no cell."""
        if len(values) != len(self.columns):
            raise Refused(f"a sparse tensor: {len(values)} values for {len(self.columns)} cells")
        whole = np.full(self.shape, fill, values.dtype)
        whole[self.rows, self.columns] = values
        return whole


def check_cells(shapes: Iterable[Sequence[int]]) -> None:
    """Raise Refused where tensors of these shapes are too large together."""
    sizes = [tuple(shape) for shape in shapes]
    if negative := [shape for shape in sizes if any(size < 0 for size in shape)]:
        raise Refused(f"a tensor of shape {list(negative[0])}")
    cells = sum(math.prod(shape) for shape in sizes)
    if cells > LARGEST_CELLS:
        raise Refused(f"tensors of {cells} elements: at most {LARGEST_CELLS} in a request")


def _elements(raw: bytes, dtype: np.dtype[Any], name: str) -> _Array:
    if len(raw) % dtype.itemsize:
        raise Refused(f"{name}: {len(raw)} bytes are no whole number of {dtype.name}")
    return np.frombuffer(raw, dtype)


def read_tensor(tensor: Any, name: str) -> _Array:
    """A Tensor as an array, dense whatever its layout. Raises Refused."""
    if tensor.dtype not in DTYPES:
        raise Refused(f"{name}: dtype {tensor.dtype}, wanted float32, int64 or int32")
    dtype, shape = DTYPES[tensor.dtype], tuple(tensor.shape)
    if tensor.HasField("sparse_csr"):
        if len(shape) != 2:
            raise Refused(f"{name}: sparse with shape {list(shape)}, wanted [tokens, K]")
        csr = tensor.sparse_csr
        layout = SparseLayout(
            (shape[0], shape[1]),
            _elements(csr.crow_indices, DTYPES[2], name),
            _elements(csr.col_indices, DTYPES[2], name),
        )
        return layout.dense(_elements(csr.values, dtype, name), 0)
    array = _elements(tensor.dense, dtype, name)
    shape = shape or array.shape
    if math.prod(shape) != array.size:
        raise Refused(f"{name}: {array.size} elements for shape {list(shape)}")
    return array.reshape(shape)


def tokens_of(ids: _Array, name: str, vocab: int, least: int = 0) -> Int32:
    """Ids as int32, from `least` on. Raises Refused for one that the vocabulary lacks."""
    if ids.dtype.kind != "i":
        raise Refused(f"{name}: {ids.dtype.name}, wanted integers")
    if ids.size and (outside := ids[(ids < least) | (ids >= vocab)]).size:
        raise Refused(f"{name}: token {outside.flat[0]}, wanted {least} to {vocab - 1}")
    return np.array(ids, np.int32)  # a copy: the body's bytes cannot be written to


def read_forward_backward(request: Any, info: ServedModel) -> ForwardBackward:
    """The request of a ForwardBackwardRequest. Raises Refused."""
    settings = dict(request.loss_fn_config)
    for name, value in request.loss_fn_config_v2.items():
        if value.HasField("text"):
            raise Refused(f"loss_fn_config: {name}={value.text!r:.60}, wanted a number")
        if not value.HasField("number"):
            raise Refused(f"loss_fn_config: {name} without a value, wanted a number")
        settings[name] = value.number
    for name, number in settings.items():
        if not math.isfinite(number):
            raise Refused(f"loss_fn_config: {name}={number}, wanted a finite number")
    if not request.data:
        raise Refused("data: empty, wanted one datum or more")
    check_cells(tensor.shape for datum in request.data for tensor in datum.loss_fn_inputs.values())
    data = tuple(
        _read_datum(datum, f"data[{number}]", info) for number, datum in enumerate(request.data)
    )
    backward = not request.forward_only
    return ForwardBackward(request.model_id, data, request.loss_fn, settings, backward)


def _read_datum(datum: Any, name: str, info: ServedModel) -> Datum:
    if any(not chunk.HasField("encoded_text") for chunk in datum.model_input):
        raise Refused(f"{name}.model_input: an image or audio, wanted text alone")
    chunks = [
        _elements(chunk.encoded_text.tokens, DTYPES[3], f"{name}.model_input")
        for chunk in datum.model_input
    ]
    tokens = np.concatenate([np.empty(0, np.int32), *chunks])
    if not 0 < len(tokens) <= info.max_tokens:
        raise Refused(f"{name}: {len(tokens)} tokens, wanted {info.lengths}")
    arrays = {
        key: read_tensor(tensor, f"{name}.{key}")
        for key, tensor in sorted(datum.loss_fn_inputs.items())
    }
    targets = arrays.pop("target_tokens", None)
    if targets is None:
        raise Refused(f"{name}: no target_tokens in loss_fn_inputs")
    for key, array in {"target_tokens": targets, **arrays}.items():
        if array.ndim not in (1, 2) or len(array) != len(tokens) or not array.size:
            wanted = f"[{len(tokens)}] or [{len(tokens)}, K], as the input"
            raise Refused(f"{name}.{key}: shape {list(array.shape)}, wanted {wanted}")
    return Datum(
        tokens_of(tokens, f"{name}.model_input", info.vocab),
        tokens_of(targets, f"{name}.target_tokens", info.vocab),
        {key: _finite(array, f"{name}.{key}") for key, array in arrays.items()},
    )


def _finite(array: _Array, name: str) -> Float32:
    if not np.isfinite(array).all():
        raise Refused(f"{name}: a value is not finite")
    return np.array(array, np.float32)


def write_outputs(outputs: LossOutputs) -> bytes:
    """The bytes of a ForwardBackwardOutput."""
    written: Any = MESSAGES["ForwardBackwardOutput"](loss_fn_output_type="ArrayRecord")
    for name, value in outputs.metrics.items():
        assert name.count(":") == 1, f"{name}: the client combines `NAME:REDUCTION`"
        written.metrics[name] = value
    # A record has one trailing shape, so data of another K begin a new one.
    for trailing, group in groupby(outputs.logprobs, key=lambda array: array.shape[1:]):
        arrays = [np.ascontiguousarray(array, DTYPES[FLOAT32]) for array in group]
        record = written.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(arrays))
        tensor = record.fields["logprobs"]
        tensor.data = b"".join(array.tobytes() for array in arrays)
        sizes = np.cumsum([0, *(array.nbytes for array in arrays)])
        tensor.offsets = sizes.astype(DTYPES[2]).tobytes()
        tensor.dtype = FLOAT32
        tensor.trailing_shape.extend(trailing)
    return bytes(written.SerializeToString())


def write_samples(samples: Samples, layout: SparseLayout | None = None) -> bytes:
    """The bytes of a SampleResponse; named tokens in the `layout` that they were asked in."""
    written: Any = MESSAGES["SampleResponse"]()
    for sequence in samples.sequences:
        _write_sequence(written.sequences.add(), sequence)
    if samples.prompt_logprobs is not None:
        written.prompt_logprobs = _bytes(samples.prompt_logprobs, FLOAT32)
    if samples.topk is not None:
        _write_likeliest(written.topk_prompt_logprobs, samples.topk)
    if samples.named is not None:
        tensor = written.target_prompt_logprobs
        tensor.dtype = FLOAT32
        tensor.shape.extend(samples.named.shape)
        if layout is None:
            tensor.dense = _bytes(samples.named, FLOAT32)
        else:
            tensor.sparse_csr.values = _bytes(samples.named[layout.rows, layout.columns], FLOAT32)
            tensor.sparse_csr.crow_indices = _bytes(layout.starts, 2)
            tensor.sparse_csr.col_indices = _bytes(layout.columns, 2)
    return bytes(written.SerializeToString())


def _write_sequence(written: Any, sequence: SampledResponse) -> None:
    written.stop_reason = STOP_REASONS[sequence.stop_reason]
    written.tokens = _bytes(sequence.tokens, 3)
    written.logprobs = _bytes(sequence.logprobs, FLOAT32)
    if sequence.topk is not None:
        _write_likeliest(written.topk_sampled_logprobs, sequence.topk)


def _write_likeliest(written: Any, likeliest: LikeliestTokens) -> None:
    written.token_ids = _bytes(likeliest.tokens, 3)
    written.logprobs = _bytes(likeliest.logprobs, FLOAT32)
    written.length, written.k = likeliest.tokens.shape


def _bytes(array: _Array, dtype: int) -> bytes:
    return np.ascontiguousarray(array, DTYPES[dtype]).tobytes()
