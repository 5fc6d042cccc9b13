"""kind=math on answers as MATH, DeepScaleR and the like hold them, without delimiters."""

import pytest

from hybridrl.config import RewardConfig, RewardKind
from hybridrl.rewards.results import RewardInput
from hybridrl.rewards.worker import make_verifier

ANSWERS = [
    "(1,2)", "[0,1)", "3, 5, 7", "x^2+1", "6 - 5i", "2^{10}", r"\$5", "A", r"\frac{1}{2}", "72",
    r"\{1,2\}", r"\text{(B)}", "1,001", r"3\sqrt{2}", "yes", r"(-\infty, 3]", "x=4",
    r"\begin{pmatrix}1\\2\end{pmatrix}", "0.75", r"\frac{\pi}{3}",
]  # fmt: skip


def judged(answer: str, response: str, **settings: str) -> float:
    verify = make_verifier(RewardConfig(kind=RewardKind.math, **settings))
    return verify(RewardInput("", response, answer))[0]


@pytest.mark.parametrize("answer", ANSWERS)
def test_an_answer_is_right_in_every_form(answer: str) -> None:
    forms = ["{}", "So it is \\boxed{{{}}}.", "First 17, then ${}$.", "We get \\[{}\\]"]
    assert [judged(answer, form.format(answer)) for form in forms] == [1.0] * 4
    assert judged(answer, f"<a>{answer}</a>", extract="<a>(.*?)</a>") == 1.0
    for delimited in (f"${answer}$", f"\\boxed{{{answer}}}"):  # the field may have its own
        assert judged(delimited, f"\\boxed{{{answer}}}") == 1.0


@pytest.mark.parametrize("answer", ANSWERS)
def test_another_answer_is_wrong(answer: str) -> None:
    sets = {"(1,2)", r"\{1,2\}"}  # math-verify takes a pair for the set of its numbers
    for other in ANSWERS:
        if other != answer and {answer, other} != sets:
            for form in ("{}", "\\boxed{{{}}}"):
                assert judged(answer, form.format(other)) == 0.0, (answer, other)


def test_a_part_of_an_answer_is_no_answer() -> None:
    assert judged("3, 5, 7", "7") == judged("3, 5, 7", r"\boxed{7}") == 0.0
    assert judged("3, 5, 7", r"\boxed{7, 3, 5}") == 1.0
    assert judged("(1,2)", "1") == judged("x^2+1", "1") == judged("6 - 5i", "6") == 0.0
    assert judged("10", "2^{10}") == 0.0
    assert judged("1024", "2^{10}") == judged("0.5", r"\boxed{\frac{1}{2}}") == 1.0


def test_prose_is_searched_for_its_answer() -> None:
    assert judged("72", "In all there are 72 apples.") == 1.0
    assert judged("72", "In all there are 73 apples.") == 0.0
    assert judged("72", "words") == judged("72", "") == 0.0


@pytest.mark.parametrize(
    "end",
    [
        "</think>",
        "[/THINK]",
        "</seed:think>",
        "<|end|><|start|>assistant<|channel|>final<|message|>",
    ],
)
def test_a_draft_in_thoughts_is_no_answer(end: str) -> None:
    drafts = f"Perhaps \\boxed{{5}} or\n$9$, no.\nLet me see.{end}\n\n"
    for answer in ("So it is \\boxed{7}.", "The answer is 7.", "7", "$x = 7$"):
        assert judged("7", drafts + answer) == 1.0
        assert judged("5", drafts + answer) == judged("9", drafts + answer) == 0.0
    assert judged("5", f"It is \\boxed{{5}}{end}\n") == 1.0  # nothing comes after
    assert judged("5, 7", f"{drafts}\\boxed{{5}} and \\boxed{{7}}") == 1.0


def test_one_of_several_right_answers() -> None:
    verify = make_verifier(RewardConfig(kind=RewardKind.math))
    for response, reward in (("1/2", 1.0), (r"\boxed{3}", 1.0), ("4", 0.0)):
        item = RewardInput("", response, "0.5", answers=("0.5", "3"))
        assert verify(item)[0] == reward
