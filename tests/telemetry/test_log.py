"""The log of a process: who writes a line, and from which level on."""

import logging
from pathlib import Path

import pytest

from hybridrl.config import LogLevel
from hybridrl.telemetry.log import as_rank, command_log, driver_log, logged, rank_log

logger = logging.getLogger("hybridrl.room")


def messages(file: Path) -> list[str]:
    """The lines of a log, without their time."""
    return [line.split(maxsplit=2)[2] for line in file.read_text().splitlines()]


def test_a_line_has_process_level_room_and_message(tmp_path: Path) -> None:
    file = tmp_path / "logs" / "driver.log"
    with driver_log(LogLevel.debug, file):
        logger.debug("one of %d", 2)
        with as_rank(0):
            rank_log(0, LogLevel.error, None)  # in the driver's process: its log stays as it is
            logger.info("two")
        logger.info("three")
    logger.error("after")
    assert messages(file) == [
        "driver DEBUG hybridrl.room: one of 2",
        "rank 0 INFO hybridrl.room: two",
        "driver INFO hybridrl.room: three",
    ]


@pytest.mark.parametrize("level", LogLevel)
def test_lines_below_the_level_are_left_out(tmp_path: Path, level: LogLevel) -> None:
    with driver_log(level, tmp_path / "log"):
        for one in LogLevel:
            logger.log(logging.getLevelNamesMapping()[one.value.upper()], one.value)
    levels = list(LogLevel)
    kept = [one.value for one in levels[levels.index(level) :]]
    assert [line.rpartition(" ")[2] for line in messages(tmp_path / "log")] == kept


def test_a_second_run_in_the_process_appends_and_writes_each_line_once(tmp_path: Path) -> None:
    for text in ("first", "second"):
        with driver_log(LogLevel.info, tmp_path / "log"):
            logger.info(text)
    assert [line.rpartition(" ")[2] for line in messages(tmp_path / "log")] == ["first", "second"]
    assert not logging.getLogger("hybridrl").handlers


def test_what_fails_is_said_with_its_seconds(tmp_path: Path) -> None:
    def fail() -> None:
        with logged(logger, "call update"):
            raise ValueError("no")

    with driver_log(LogLevel.debug, tmp_path / "log"):
        with logged(logger, "call save"):
            pass
        with pytest.raises(ValueError, match="no"):
            fail()
    said = [
        line.rpartition(": ")[2].rpartition(" after ")[0] for line in messages(tmp_path / "log")
    ]
    assert said == ["", "call save ended", "", "call update failed"]


def test_warnings_are_shown_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with driver_log(LogLevel.info, tmp_path / "log"):
        logger.info("not shown")
        logger.warning("shown")
    assert capsys.readouterr().err == "shown\n"


@pytest.mark.parametrize("level", LogLevel)
def test_a_command_without_a_run_shows_its_lines_at_debug_alone(
    level: LogLevel, capsys: pytest.CaptureFixture[str]
) -> None:
    with command_log(level):
        logger.debug("one")
        logger.info("two")
    logger.debug("after")
    lines = capsys.readouterr().err.splitlines()
    shown = ["driver DEBUG hybridrl.room: one", "driver INFO hybridrl.room: two"]
    assert [line.split(maxsplit=2)[2] for line in lines] == shown * (level is LogLevel.debug)
    assert not logging.getLogger("hybridrl").handlers
