"""Samples in Parquet files: whole, once, after a kill too, and as `datasets` reads them."""

import operator
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from datasets import load_dataset
from gloo_ranks import ByValue, fork_context
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from hybridrl.flow.ledger import Drop, DropReason
from hybridrl.flow.sample import SampleId, TokenSpan
from hybridrl.models.response_text import ResponseText
from hybridrl.models.tiny import make_char_tokenizer
from hybridrl.telemetry import sample_files
from hybridrl.workers.sample_writer import SampleFacts, SampleWriter, TextColumns
from hybridrl.workers.store import ROUTED_EXPERTS, StoredSample

TOKENIZER = make_char_tokenizer("abcdefghij", 64)


def sample(
    prompt: str, response: str, *, position: int = 0, k: int = 0, drop: Drop | None = None
) -> tuple[SampleFacts, StoredSample]:
    """A sample as it is when its step ends."""
    ids = [TOKENIZER.encode(text) for text in (prompt, response)]
    num = len(ids[1])
    facts = SampleFacts(
        SampleId(position, "", k),
        "words",
        "spell",
        (TokenSpan(0, 2, 4), TokenSpan(2, num, 5, trained=False)),
        {"reward": 0.5, "reward_status": "ok", "advantage": -1.5, "finish": "length"},
        drop,
    )
    tensors = {
        "tokens": torch.tensor([*ids[0], *ids[1]]),
        "log_probs": -torch.arange(num, dtype=torch.float32),
        "values": torch.ones(num, dtype=torch.float64),
        ROUTED_EXPERTS: torch.zeros(num, 1, 2, dtype=torch.uint8),
    }
    return facts, StoredSample(num, None, tensors)


def test_datasets_reads_every_sample_with_all_that_is_known_of_it(tmp_path: Path) -> None:
    dropped = Drop(DropReason.FILTER, "has_spread let it go")
    for rank in range(2):
        writer = SampleWriter(tmp_path, rank, ResponseText(TOKENIZER))
        writer.put(3, "rl", [sample("abc", "defg", position=rank, k=k) for k in range(2)])
        writer.put(4, "rl", [sample("ab", "ghi", position=9 + rank, drop=dropped)])
        writer.close()
    rows = load_dataset(
        "parquet", data_files=f"{tmp_path}/samples/*.parquet", cache_dir=tmp_path / "cache"
    )["train"]
    assert [(row["step"], row["id"]) for row in rows] == [
        (3, "0.0"), (3, "0.1"), (3, "1.0"), (3, "1.1"), (4, "9.0"), (4, "10.0"),
    ]  # fmt: skip
    row = rows[0]
    assert (row["prompt"], row["response"], row["phase"]) == ("abc", "defg", "rl")
    assert row["token_texts"] == list("defg")
    assert TOKENIZER.decode(row["prompt_ids"]) + TOKENIZER.decode(row["response_ids"]) == "abcdefg"
    assert (row["prompt_tokens"], row["response_tokens"]) == (3, 4)
    assert row["log_probs"] == [0.0, -1.0, -2.0, -3.0]
    assert (row["reward"], row["advantage"], row["finish"]) == (0.5, -1.5, "length")
    assert row["advantages"] is None
    assert (row["source"], row["task"], row["prompt_position"], row["k"]) == (
        "words",
        "spell",
        0,
        0,
    )
    assert row["spans"] == [
        {"start": 0, "stop": 2, "version": 4, "trained": True},
        {"start": 2, "stop": 4, "version": 5, "trained": False},
    ]
    assert row["scalars"] == [
        {"name": "reward", "value": 0.5, "text": None},
        {"name": "reward_status", "value": None, "text": "ok"},
    ]
    assert row["fields"] == [{"name": "values", "values": [1.0] * 4}]
    assert (row["status"], row["drop_reason"]) == ("used", None)
    last = rows[-1]
    assert (last["status"], last["drop_reason"], last["drop_text"]) == (
        "dropped", "filter", "has_spread let it go",
    )  # fmt: skip


def test_samples_without_log_probabilities_and_without_tokens_have_the_same_columns(
    tmp_path: Path,
) -> None:
    """Targets of a dataset, and a response that ends at once."""
    facts, stored = sample("abc", "de")
    del stored.tensors["log_probs"]
    empty = sample("abc", "", k=1)
    with_advantages = sample("abc", "de", k=2)
    with_advantages[1].tensors["advantages"] = torch.tensor([0.25, 0.5])
    writer = SampleWriter(tmp_path, 0, ResponseText(TOKENIZER))
    writer.put(1, "warm_start", [(facts, stored), empty, with_advantages])
    writer.close()
    table = sample_files.read(sample_files.files_by_step(tmp_path)[1], sample_files.schema().names)
    assert table["log_probs"].to_pylist() == [None, [], [0.0, -1.0]]
    assert table["advantages"].to_pylist() == [None, None, [0.25, 0.5]]
    assert table["token_texts"].to_pylist() == [["d", "e"], [], ["d", "e"]]


def test_a_sample_may_be_released_and_moved_while_it_waits(tmp_path: Path) -> None:
    facts, stored = sample("abc", "de")
    writer = SampleWriter(tmp_path, 0, ResponseText(TOKENIZER))
    writer.put(1, "rl", [(facts, stored)])
    stored.tensors.clear()
    writer.flush()
    (paths,) = sample_files.files_by_step(tmp_path).values()
    assert sample_files.read(paths, ["response"])["response"].to_pylist() == ["de"]


def test_texts_that_have_no_utf8_form_are_written(tmp_path: Path) -> None:
    """A verifier's status may quote a model's broken output."""
    facts, stored = sample("abc", "de", drop=Drop(DropReason.FILTER, "a \udc80"))
    status = {"reward_status": "error: \ud800", "finish": "\udfff", "\ud800": 1.0}
    writer = SampleWriter(tmp_path, 0, ResponseText(TOKENIZER))
    broken = replace(facts, source="\ud800", task="\udc80", scalars=status)
    writer.put(1, "rl", [(broken, stored)])
    writer.close()
    columns = ["task", "finish", "drop_text", "scalars"]
    (row,) = sample_files.read(sample_files.files_by_step(tmp_path)[1], columns).to_pylist()
    assert [row[name] for name in columns[:3]] == ["?", "?", "a ?"]
    assert row["scalars"] == [
        {"name": "reward_status", "value": None, "text": "error: ?"},
        {"name": "?", "value": 1.0, "text": None},
    ]


def test_an_error_of_the_thread_names_file_and_step(tmp_path: Path) -> None:
    facts, stored = sample("abc", "de")
    del stored.tensors["tokens"]
    writer = SampleWriter(tmp_path, 3, ResponseText(TOKENIZER))
    writer.put(12, "rl", [(facts, stored)])
    with pytest.raises(RuntimeError, match=r"step-000012-rank-0003\.parquet: .*step 12: KeyError"):
        writer.flush()
    writer.close()


def test_tokens_that_begin_a_word_keep_their_space() -> None:
    """SentencePiece marks it, and leaves it out of a text's first word."""
    words = {"▁the": 0, "▁cat": 1, "s": 2}
    model = Tokenizer(BPE(words, []))
    model.decoder = decoders.Metaspace()
    texts = TextColumns(ResponseText(PreTrainedTokenizerFast(tokenizer_object=model)))
    assert texts.tokens([torch.tensor([0, 1, 2])]).to_pylist() == [[" the", " cat", "s"]]


def test_a_full_disk_is_told_at_the_next_step_by_its_path(tmp_path: Path) -> None:
    (tmp_path / "samples").write_text("no folder")
    writer = SampleWriter(tmp_path, 0, ResponseText(TOKENIZER))
    writer.put(1, "rl", [sample("a", "b")])
    with pytest.raises(OSError, match="samples"):
        writer.flush()
    writer.close()  # told once


def test_later_steps_are_forgotten_and_what_a_kill_has_left(tmp_path: Path) -> None:
    for rank in range(2):
        writer = SampleWriter(tmp_path, rank, ResponseText(TOKENIZER))
        for step in (1, 2, 12):
            writer.put(step, "rl", [sample("a", "b")])
        writer.close()
    (tmp_path / "samples" / ".step-000002-rank-0000.parquet.77").write_text("half")
    (tmp_path / "samples" / "mine.txt").write_text("a note")
    sample_files.forget_after(tmp_path, 1)
    assert sorted(path.name for path in (tmp_path / "samples").iterdir()) == [
        "mine.txt", "step-000001-rank-0000.parquet", "step-000001-rank-0001.parquet",
    ]  # fmt: skip


def write_without_end(run: Path) -> None:
    """Write step after step."""
    torch.set_num_threads(1)
    writer = SampleWriter(run, 0, ResponseText(TOKENIZER))
    samples = [sample("abc", "defg" * 500, k=k) for k in range(64)]
    for step in range(1, 10**6):
        writer.put(step, "rl", samples)


@pytest.mark.layouts
def test_a_killed_writer_leaves_whole_files_alone(tmp_path: Path) -> None:
    """`kill -9` at any moment of a write: what matches `*.parquet` is readable."""
    for number in range(5):
        run = tmp_path / str(number)
        run.mkdir()
        writer = fork_context().Process(
            target=operator.call, args=(ByValue(write_without_end, run),)
        )
        writer.start()
        end = time.monotonic() + 120
        while len(sample_files.files_by_step(run)) < 3 + number:
            assert writer.is_alive()
            assert time.monotonic() < end
            time.sleep(0.003)
        writer.kill()
        writer.join()
        steps = sample_files.files_by_step(run)
        for paths in steps.values():
            assert len(sample_files.read(paths, ["response_ids"])) == 64
        sample_files.forget_after(run, 0)
        assert list((run / "samples").iterdir()) == []
