"""The verifier of programs: test cases of a row, and the share that a program passes in a jail."""

import json
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any

from hybridrl.config import ConfigError, JudgeConfig, SourceConfig
from hybridrl.sandbox.jail import Jail, choose

TIME_SHARE = 0.9
"""The share of `timeout_s` for the tests of one sample; the verifier has the rest."""
_FENCE = re.compile(r"^```(?:python3?|py)[ \t]*\n(.*?)^```", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeTest:
    """One test of a program: text in and out, a call of its function, or unit tests.

    `expected` stays with the verifier. The source `check` does not: it runs with the program.
    """

    stdin: str = ""
    function: str = ""
    arguments: tuple[Any, ...] = ()
    expected: Any = ""
    check: str = ""

    def passed_in(self, jail: Jail, seconds: float) -> bool:
        """Run it."""
        if self.check:
            return jail.check(self.check, seconds).status == "ok"
        if self.function:
            result = jail.call(self.function, self.arguments, seconds)
            return result.status == "ok" and same_value(result.value, self.expected)
        result = jail.run(self.stdin, seconds)
        return result.status == "ok" and same_text(result.stdout, self.expected)


def program_in(response: str) -> str:
    """The last fenced block of Python in a response, or all of it without one."""
    blocks = _FENCE.findall(response)
    return blocks[-1] if blocks else response


def judge_program(program: str, row: Mapping[str, Any], config: JudgeConfig) -> float:
    """The share of the row's tests that `program` passes, or 1.0 for all of them and else 0.0.

    Tests that `timeout_s` leaves no time for count as failed. Raises ValueError for a row without
    tests, JailError where a jail breaks.
    """
    tests = parse_tests(row)
    if not program.strip():
        return 0.0
    end, passed = time.monotonic() + TIME_SHARE * config.timeout_s, 0
    with Jail(program, config.limits, choose(config.jail).kind) as jail:
        for test in tests:
            left = min(config.limits.seconds, end - time.monotonic())
            if left > 0 and test.passed_in(jail, left):
                passed += 1
            elif not config.partial_credit:
                return 0.0
    return passed / len(tests)


def parse_tests(row: Mapping[str, Any]) -> list[CodeTest]:
    """The tests in a row's answer, at least one; docs/rewards.md lists the forms.

    Raises ValueError that says what is wrong.
    """
    value = row["answer"]
    if isinstance(value, Mapping) and "ground_truth" in value:  # verl's `reward_model`
        value = value["ground_truth"]
    if isinstance(value, str):
        value = _parsed(value)
    if isinstance(value, str):
        tests = [_unit_tests(value, row)] if value.strip() else []
    elif isinstance(value, Mapping):
        tests = _of_lists(value)
    elif isinstance(value, Sequence):
        tests = [_of_entry(entry, row) for entry in value]
    else:
        raise ValueError(f"{type(value).__name__} in place of tests")
    if not tests:
        raise ValueError("no tests")
    return tests


def same_text(output: str, expected: str) -> bool:
    """Whether two outputs have the same lines, but for spaces at their ends and numbers' form."""
    ours, theirs = (_lines(text) for text in (output, expected))
    return len(ours) == len(theirs) and all(map(_same_line, ours, theirs))


def same_value(value: Any, expected: Any) -> bool:
    """Whether a function's value is the expected one, which APPS writes as a list of one, too."""
    return bool(value == expected) or (isinstance(expected, list) and [value] == expected)


def _parsed(text: str) -> Any:
    """JSON, or the text where it is none (source of unit tests)."""
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if isinstance(value, list | dict) else text


def _of_lists(value: Mapping[str, Any]) -> list[CodeTest]:
    """APPS, TACO, PRIME: `{"inputs": [...], "outputs": [...], "fn_name": ...}`."""
    inputs, outputs = value.get("inputs"), value.get("outputs")
    if not isinstance(inputs, Sequence) or not isinstance(outputs, Sequence):
        raise ValueError(f"{sorted(value)} without inputs and outputs")
    if len(inputs) != len(outputs):
        raise ValueError(f"{len(inputs)} inputs for {len(outputs)} outputs")
    function = str(value.get("fn_name") or "")
    return [_of_pair(*pair, function) for pair in zip(inputs, outputs, strict=True)]


def _of_entry(entry: Any, row: Mapping[str, Any]) -> CodeTest:
    """MBPP: an assertion. LiveCodeBench: `{"input", "output", "testtype", "metadata"}`."""
    if isinstance(entry, str):
        return _unit_tests(entry, row)
    if not isinstance(entry, Mapping) or "input" not in entry or "output" not in entry:
        raise ValueError("a test without input and output")
    function = ""
    if entry.get("testtype", entry.get("type")) in ("functional", "function_call"):
        function = _function_name(entry) or _function_name(row)
        if not function:
            raise ValueError("a functional test without fn_name or metadata.func_name")
    return _of_pair(entry["input"], entry["output"], function)


def _function_name(fields: Mapping[str, Any]) -> str:
    metadata = fields.get("metadata")
    if isinstance(metadata, str):
        metadata = _parsed(metadata)
    name = fields.get("fn_name")
    if not name and isinstance(metadata, Mapping):
        name = metadata.get("func_name")
    return str(name or "")


def _of_pair(argument: Any, expected: Any, function: str) -> CodeTest:
    """A test of text, or of a function: arguments as a list, or one in JSON on each line."""
    if not function:
        return CodeTest(stdin=_text(argument), expected=_text(expected))
    if isinstance(argument, str):
        argument = [json.loads(line) for line in argument.splitlines() if line.strip()]
        expected = json.loads(expected) if isinstance(expected, str) else expected
    return CodeTest(function=function, arguments=tuple(argument), expected=expected)


def _text(value: Any) -> str:
    """Text, which some data sets keep as a list of lines."""
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _unit_tests(source: str, row: Mapping[str, Any]) -> CodeTest:
    """Assertions and functions of pytest; MBPP's imports come before, HumanEval's call after."""
    if "assert" not in source or "unittest" in source:
        raise ValueError("unit tests without assert, or of unittest")
    before = [str(line) for line in row.get("test_imports") or []]
    before.append(str(row.get("test_setup_code") or ""))
    after = f"check({row['entry_point']})" if row.get("entry_point") else ""
    return CodeTest(check="\n".join([*before, source, after]))


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _same_line(ours: str, theirs: str) -> bool:
    if ours == theirs:
        return True
    a, b = ours.split(), theirs.split()
    return len(a) == len(b) and all(x == y or _same_number(x, y) for x, y in zip(a, b, strict=True))


def _same_number(a: str, b: str) -> bool:
    try:
        return Decimal(a) == Decimal(b)
    except InvalidOperation:
        return False


def check_tests(
    role: str, rows: Iterable[tuple[SourceConfig, str, str, Mapping[str, Any]]]
) -> None:
    """Raise ConfigError for the first row without tests.

    `rows` come with their source, its name and where they stand in it.
    """
    for source, name, where, row in rows:
        try:
            parse_tests(row)
        except ValueError as error:
            at = f"{where}: {str(row.get('question', ''))[:60]!r}"
            allowed = f"a column with tests in every row, for {role}.kind=code ({error}; {at})"
            place = f"{name}.source" if name.startswith("eval.sets.") else f"data.sources.{name}"
            raise ConfigError(f"{place}.answer_column", source.answer_column, allowed) from None
