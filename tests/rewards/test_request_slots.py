"""The slots of requests in flight: their number, their order, and canceled ones."""

import asyncio
import random

from hybridrl.rewards.endpoint import RequestSlots


def test_retries_go_before_new_requests() -> None:
    order: list[str] = []

    async def request(slots: RequestSlots, name: str, retry: int) -> None:
        async with slots.one(retry):
            order.append(name)
            await asyncio.sleep(0)

    async def run() -> None:
        slots = RequestSlots(1)
        names = {"first": 0, "new": 0, "newer": 0, "again": 1, "third time": 2}
        await asyncio.gather(*(request(slots, name, n) for name, n in names.items()))

    asyncio.run(run())
    assert order == ["first", "third time", "again", "new", "newer"]


def test_no_slot_is_lost_or_given_twice_when_requests_are_canceled() -> None:
    async def run(seed: int) -> int:
        draw, slots, held, most = random.Random(seed), RequestSlots(3), 0, 0

        async def request(retry: int) -> None:
            nonlocal held, most
            async with slots.one(retry):
                held += 1
                most = max(most, held)
                try:
                    for _ in range(draw.randrange(4)):
                        await asyncio.sleep(0)
                finally:
                    held -= 1

        tasks = [asyncio.create_task(request(draw.randrange(3))) for _ in range(40)]
        for _ in range(15):
            await asyncio.sleep(0)
            draw.choice(tasks).cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert held == 0
        async with slots.one(0), slots.one(0), slots.one(0):  # all are free again
            pass
        return most

    assert {asyncio.run(asyncio.wait_for(run(seed), 10)) for seed in range(50)} == {3}
