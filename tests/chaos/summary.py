"""What was tried, from the lines of JSON of all cases, as a table of docs/checkpoints.md."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from chaos.cases import NOTHING, OF_FILES, Kind

PAGE = Path(__file__).parents[2] / "docs" / "checkpoints.md"
BEGIN, END = "<!-- chaos: tests/chaos writes this -->", "<!-- end of chaos -->"


def summary(lines: Sequence[dict[str, Any]]) -> str:
    """Counts of faults, by kind, and what did not hold."""
    lines = [line | {"struck": [_of(fault) for fault in line["struck"]]} for line in lines]
    struck = [fault for line in lines for fault in line["struck"]]
    drawn = sum(len(line["faults"]) for line in lines)
    kinds = Counter(fault["fault"] for fault in struck)
    settings = Counter(line["setting"] for line in lines)
    restarts = sum(line["restarted"] for line in lines)
    again = sum(len(line["ends"]) - 1 for line in lines)
    on_ray = [line for line in lines if line.get("cluster") == "local"]
    of_ray = sum(len(line["struck"]) for line in on_ray)
    rows = ["| fault | times | in runs | of these not as they must be |", "|---|---|---|---|"]
    for kind in Kind:
        of_kind = [x for x in lines if any(f["fault"] == kind.name for f in x["struck"])]
        wrong = sum(bool(line["wrong"]) for line in of_kind)
        rows.append(f"| {kind.value} | {kinds[kind.name]} | {len(of_kind)} | {wrong} |")
    parts = [
        f"{len(lines)} runs under {len(struck)} faults ({drawn - len(struck)} more were drawn for "
        f"moments that did not come). Their last records have {restarts} restarts; "
        f"the command was given again {again} times. "
        f"{len(on_ray)} of the runs, under {of_ray} of the faults, were on Ray.",
        "\n".join(rows),
        f"Runs by schedule and recipe: {_counts(settings)}.",
    ]
    return "\n\n".join(parts)


def _of(fault: dict[str, Any]) -> dict[str, Any]:
    """The fault as what it was: where there is no file to damage, the driver is killed alone."""
    names = {kind.name for kind in OF_FILES}
    alone = fault["fault"] in names and fault["hit"] == NOTHING
    return fault | {"fault": Kind.KILL_DRIVER.name} if alone else fault


def _counts(counter: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counter.most_common())


def write(lines: Sequence[dict[str, Any]]) -> None:
    """Bring the page up to date."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    assert after, f"{PAGE} has no {BEGIN} and {END}"
    PAGE.write_text(f"{before}{BEGIN}\n\n{summary(lines)}\n\n{END}{after}")
