"""What fails one request alone, whatever fails in it: on ranks that compute nothing."""

from pathlib import Path

import pytest
from serve_ranks import FakeRanks, answered, taken, turns_of

from hybridrl.serving.requests import CreateModel, Expire, Refused, Save, Unload


def test_an_error_while_a_request_is_taken_fails_it_alone(tmp_path: Path) -> None:
    turns = turns_of(FakeRanks(), tmp_path)
    answered(turns, CreateModel("a", 4))
    record = tmp_path / "models" / "a" / "weights" / "x" / "checkpoint.json"
    record.parent.mkdir(parents=True)
    record.write_text("no JSON")
    failed = taken(turns, Expire("tinker://a/weights/x", None))
    with pytest.raises(ValueError, match="Expecting value"):
        failed.result(0)
    answered(turns, Unload("a"))
