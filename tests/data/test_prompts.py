"""Items: the responses of neighbors."""

from hybridrl.data.prompts import Item, with_next_targets


def item(prompt: int, target: int, chosen: int, first: int) -> Item:
    """An item of so many tokens, numbered from `first`."""
    ids = tuple(range(first, first + target))
    return Item("p", tuple(range(prompt)), "a", ids, "s", {}, {"chosen": ids[:chosen]})


def test_each_item_gets_the_responses_of_the_next() -> None:
    """As long as prompt and response together are no longer than the longest of their own."""
    items = [item(4, 3, 1, 10), item(2, 5, 2, 20), item(1, 2, 2, 30)]
    joined = with_next_targets(items)
    assert [x.prompt_ids for x in joined] == [x.prompt_ids for x in items]
    assert [x.target_ids for x in joined] == [(20, 21, 22), (30, 31), (10, 11, 12)]
    assert [x.columns["chosen"] for x in joined] == [(20, 21), (30, 31), (10,)]
    assert items[0].target_ids == (10, 11, 12)


def test_an_item_alone_is_its_own_neighbor() -> None:
    assert with_next_targets([]) == []
    alone = item(2, 3, 1, 10)
    assert with_next_targets([alone]) == [alone]
