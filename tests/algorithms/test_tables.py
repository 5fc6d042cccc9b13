"""The tables of names: each entry is there, and an unknown one is answered with all of them."""

import re
from collections.abc import Mapping

import pytest

from hybridrl import algorithms
from hybridrl.algorithms import resolve
from hybridrl.config import ConfigError

TABLES = {name: value for name, value in vars(algorithms).items() if name.isupper()}


@pytest.mark.parametrize("table", TABLES.values(), ids=list(TABLES))
def test_every_entry_can_be_called(table: Mapping[str, str]) -> None:
    functions = [resolve(table, "recipe.x", name) for name in table]
    assert all(callable(entry) and entry.__doc__ for entry in functions)
    assert len(set(functions)) == len(table) > 0


@pytest.mark.parametrize("table", TABLES.values(), ids=list(TABLES))
def test_an_unknown_name_lists_the_known_ones(table: Mapping[str, str]) -> None:
    known = ", ".join([*table, "package.module:name"])
    with pytest.raises(ConfigError, match=re.escape(f"recipe.x=none: wanted one of {known}")):
        resolve(table, "recipe.x", "none")


def test_no_table_is_left_out() -> None:
    assert set(TABLES) == {"KL_ESTIMATORS", "NORMALIZATIONS"}
