"""Keys below `reward` and `source` of an evaluation set, which are null at first."""

import pytest

from hybridrl.config import ConfigError
from hybridrl.config.compose import check, register, resolve_arguments


def sets(*arguments: str):
    register()
    return check(resolve_arguments(arguments)).eval.sets


def test_a_set_gets_a_judge_of_its_own_key_by_key() -> None:
    judge = sets("eval.sets.main.reward.kind=regex", "eval.sets.main.reward.pattern='a=(.)'")
    assert judge["main"].reward.kind.value == "regex"
    assert judge["main"].reward.pattern == "a=(.)"
    assert judge["main"].num_prompts == sets()["main"].num_prompts


def test_a_set_gets_a_judge_as_a_mapping_and_none_by_null() -> None:
    assert sets("eval.sets.main.reward={kind: exact}")["main"].reward.kind.value == "exact"
    assert sets("eval.sets.main.reward=null")["main"].reward is None


def test_a_set_gets_parameters_of_its_source() -> None:
    source = sets(
        "eval.sets.main.source.name=spell_backward",
        "+eval.sets.main.source.params.min_word_len=8",
    )["main"].source
    assert (source.name, source.params) == ("spell_backward", {"min_word_len": 8})


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("eval.sets.main.reward.kind=nope", r"eval\.sets\.main\.reward\.kind=nope: wanted one of"),
        ("eval.sets.main.reward.kin=exact", r"eval\.sets\.main\.reward\.kin=exact: wanted a name"),
    ],
)
def test_a_wrong_key_or_value_of_a_sets_judge_is_named(argument: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        sets(argument)
