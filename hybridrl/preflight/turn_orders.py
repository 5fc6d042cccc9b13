"""Recorded rounds of conversations (`environment.partial=timed`), to be repeated."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from hybridrl.config import Config, ConfigError
from hybridrl.flow.turns import RoundOrder, order_from_json
from hybridrl.telemetry.records import read_lines

FILE = "turn_orders.jsonl"


def recorded_orders(config: Config) -> Mapping[int, Sequence[RoundOrder]] | None:
    """The rounds of each step of the run that `environment.partial` names; None where it does not.

    Raises ConfigError where they are not there.
    """
    if (text := config.environment.turn_orders) is None:
        return None
    path = Path(text) / FILE if Path(text).is_dir() else Path(text)
    orders = {}
    try:
        for line in read_lines(path) if path.is_file() else ():
            orders[int(line["step"])] = [order_from_json(rows) for rows in line["rounds"]]
    except (KeyError, TypeError, ValueError):
        orders = {}
    if not orders:
        allowed = f"counted, timed, or a run with {FILE}, which environment.partial=timed writes"
        raise ConfigError("environment.partial", text, allowed)
    return orders


def check_record(config: Config) -> None:
    """Raise ConfigError where the record that a run is to repeat ends before the run does."""
    if (orders := recorded_orders(config)) is None:
        return
    first, last = config.warm_start_steps + 1, max(orders)
    if last < (wanted := config.warm_start_steps + config.trainer.steps):
        allowed = f"a record of steps {first} to {wanted}: this one ends with step {last}"
        if last >= first:
            allowed += f", as the run would with trainer.steps={last - config.warm_start_steps}"
        raise ConfigError("environment.partial", config.environment.partial, allowed)
