"""Generated tasks for `kind: function` sources: endless iterators of rows.

`work` has responses of widely different lengths, for measurements of schedules. `spell_preferences`
has pairs of responses, `long_word_cost` judges them; `spell_hints` has prompts with and without the
answer, `shapes` pictures to count in.
"""

import io
import itertools
import random
import string
from collections.abc import Iterator
from typing import Any

from hybridrl.config.reasoning import import_reasoning_gym


def work(
    seed: int, median: float = 10.0, spread: float = 0.9, max_work: int = 99
) -> Iterator[dict[str, Any]]:
    """Counting down from a number in the prompt, then the prompt's letters: a tail by choice.

    `dkq4` has `steps` `4,3,2,1` and the answer `dkq`. The number is log-normal with `median` and
    `spread` (standard deviation of the logarithm), cut off at `max_work`; p99 over p50 is
    exp(2.33 spread), 8.1 at 0.9. A small model learns it soon, since each step is a local rule.
    """
    draw = random.Random(seed)
    while True:
        letters = "".join(draw.choices(string.ascii_lowercase, k=3))
        count = min(max(1, round(draw.lognormvariate(0.0, spread) * median)), max_work)
        yield {
            "question": f"{letters}{count}",
            "answer": letters,
            "steps": ",".join(str(step) for step in range(count, 0, -1)),
            "num_steps": count,
        }


def spell_preferences(
    seed: int, min_word_len: int = 3, max_word_len: int = 8
) -> Iterator[dict[str, Any]]:
    """Words to spell backward, those of reasoning_gym, each with a right and a wrong response.

    `sun` has `chosen` `#nus`; `rejected` has one mistake of four kinds, as likely each: two
    neighbors swapped, a letter replaced, left out, or written twice.
    """
    reasoning_gym = import_reasoning_gym()  # a second, which runs without it need not pay
    draw = random.Random(seed)
    size = 1000
    lengths = {"min_word_len": min_word_len, "max_word_len": max_word_len}
    for first in itertools.count(seed, size):
        for row in reasoning_gym.create_dataset("spell_backward", seed=first, size=size, **lengths):
            answer = row["answer"]
            wrong = answer
            while wrong == answer:
                wrong = _mistaken(answer, draw)
            yield {**row, "word": answer[::-1], "chosen": f"#{answer}", "rejected": f"#{wrong}"}


def spell_hints(
    seed: int, min_word_len: int = 3, max_word_len: int = 8, hinted: float = 0.5
) -> Iterator[dict[str, Any]]:
    """Words to spell backward, those of reasoning_gym, a share of them with the answer before them.

    `sun` is `asked` as `sun:`, or if it is `hinted` as `nus>sun:`, and `told` as `nus>sun:` always:
    what a teacher may read. `hint` says which, `yes` or `no`.
    """
    draw = random.Random(seed)
    for row in spell_preferences(seed, min_word_len, max_word_len):
        plain, told = f"{row['word']}:", f"{row['answer']}>{row['word']}:"
        hint = draw.random() < hinted
        asked = told if hint else plain
        yield {**row, "asked": asked, "told": told, "hint": "yes" if hint else "no"}


def shapes(
    seed: int,
    most: int = 4,
    size: int = 24,
    colors: tuple[str, ...] = ("red",),
    exchanged: bool = False,
) -> Iterator[dict[str, Any]]:
    """Pictures of `size` x `size` pixels with 1 to `most` shapes, of which those of a color count.

    Shapes are squares, disks and triangles of 6 pixels in red, green or blue, each in a cell of 8 x
    8, on a dark ground. `<image>how many red?` has the answer `2`, and every number from 0 to
    `most` is as likely as any other. With `exchanged` a row has the picture of the row before, so
    that no answer can be seen: whoever learns from pictures stays at chance.
    """
    from PIL import Image, ImageDraw

    draw, cell = random.Random(seed), 8
    cells, before = list(itertools.product(range(0, size, cell), repeat=2)), None
    while True:
        wanted, number = draw.choice(colors), draw.randint(0, most)
        others = draw.randint(number == 0, most - number)
        kinds = [wanted] * number
        kinds += draw.choices([color for color in _COLORS if color != wanted], k=others)
        ground = tuple(draw.randrange(40) for _ in range(3))
        picture = Image.new("RGB", (size, size), ground)
        pen = ImageDraw.Draw(picture)
        for (x, y), color in zip(draw.sample(cells, len(kinds)), kinds, strict=True):
            x, y, shade = x + draw.randrange(3), y + draw.randrange(3), draw.uniform(0.7, 1)
            fill = tuple(round(channel * shade) for channel in _COLORS[color])
            box = (x, y, x + 5, y + 5)
            match draw.randrange(3):
                case 0:
                    pen.rectangle(box, fill)
                case 1:
                    pen.ellipse(box, fill)
                case _:
                    pen.polygon([(x, y + 5), (x + 5, y + 5), (x + 2, y)], fill)
        file = io.BytesIO()
        picture.save(file, "PNG")
        image, before = (before if exchanged and before else file.getvalue()), file.getvalue()
        question = f"<image>how many {wanted}?"
        yield {"question": question, "answer": str(number), "images": [image]}


_COLORS = {"red": (255, 40, 40), "green": (40, 255, 40), "blue": (60, 60, 255)}


def _mistaken(word: str, draw: random.Random) -> str:
    i = draw.randrange(len(word))
    before, letter, after = word[:i], word[i], word[i + 1 :]
    match draw.randrange(4):
        case 0:
            return before + after[:1] + letter + after[1:]
        case 1:
            return before + draw.choice(string.ascii_lowercase) + after
        case 2:
            return before + after
        case _:
            return before + 2 * letter + after


def long_word_cost(prompt: str, response: str, answer: str, item: dict[str, Any]) -> float:
    """A cost for Safe RLHF: 1 for a response of more than five letters, else -1."""
    return 1.0 if len(response) > 5 else -1.0
