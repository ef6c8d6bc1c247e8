"""Finding the answer in a completion, and which answers are equal."""

from collections.abc import Iterator
import gzip
import itertools
import json
import pathlib

from hypothesis import given
from hypothesis import strategies as st
import pytest

from dppo_jax.rewards import Grader, last_boxed
from dppo_jax.rewards.math_answers import MAX_ANSWER_CHARS

DATA = pathlib.Path(__file__).parents[3] / "shared" / "data"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason=f"no {DATA}")


@pytest.fixture(scope="module")
def math() -> Iterator[Grader]:
  with Grader("math", timeout_seconds=60) as grader:
    yield grader


def boxed(answer: str) -> str:
  return rf"So the answer is $\boxed{{{answer}}}$."


def grade(math: Grader, pairs: list[tuple[str, str]]) -> list[float]:
  """Returns 1.0 for each pair (gold answer, answer) that counts as equal."""
  golds = [gold for gold, _ in pairs]
  texts = [boxed(answer) for _, answer in pairs]
  return math.grade(golds, texts, golds).rewards.tolist()


@pytest.mark.parametrize(
  "text, answer",
  [
    (r"\boxed{5}", "5"),
    (r"first \boxed{4}, then \boxed{5}.", "5"),
    (r"\boxed{\frac{1}{\sqrt{2}}} and {so} on", r"\frac{1}{\sqrt{2}}"),
    (r"\boxed{x = \boxed{5}}", "5"),
    (r"\boxed{\boxed{5} \text{cm}}", "5"),
    (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
    (r"\boxed{\left\{ x \right.}", r"\left\{ x \right."),
    (r"\boxed{a \\} b}", r"a \\"),
    (r"} { \boxed{5}", "5"),
    (r"\boxed {5}", "5"),
    (r"\fbox{5}", "5"),
    (r"$\boxed 5$.", "5"),
    (r"\boxed -1.5.", "-1.5"),
    (r"\boxed{4} but \boxed{5", "4"),
    (r"\boxed{}", ""),
    (r"\boxed{5", None),
    (r"\boxedx{5} \unboxed{5} boxed{5}", None),
    ("5", None),
    ("", None),
    (r"\boxed{" * 100_000, None),  # quadratic time would be hours
  ],
  ids=range(20),
)
def test_last_boxed(text, answer):
  assert last_boxed(text) == answer


BALANCED = st.recursive(
  st.text("a1 ,"),
  lambda inner: st.lists(inner | inner.map("{{{}}}".format)).map("".join),
)


@given(st.text("a {}"), BALANCED, st.text("a {"))
def test_last_boxed_ignores_braces_outside_of_the_box(before, answer, after):
  text = f"{before}\\boxed{{{answer}}}{after}"
  assert last_boxed(text) == answer


EQUAL = [
  ("1000", r"1{,}000"),
  (r"\frac{12}{5,\!525}", r"\frac{12}{5525}"),
  ("0.5", r"\dfrac12"),
  ("5", r"5\ \text{units}^2"),
  ("3", "3."),
  ("5040", "7!"),
  ("5", "5 sq. units^2"),
  ("x^{-12}", "x⁻¹²"),
  (r"\sqrt{x+1}", "√(x+1)"),
  ("2.5", "2½"),
  (r"\frac{47}{22}", r"2.1\overline{36}"),
  ("1000, 2000", "1 000, 2 000"),
  ("5200000", "5.2 Million dollars"),
  ("1200000", r"1,200\text{ thousand}"),
  (r"\frac{1}{2}", r"\textcolor{red}{\frac{1}{2}}"),
  ("5", r"{\color{red} 5}"),
  ("5, 6", r"5\text{ cm}, 6\text{ cm}"),
  (r"\frac{\sqrt{2}}{2}", r"\cos(180^{\circ} - 135^{\circ})"),
  (r"30^\circ", r"\sin^{-1} 0.5 = 30^\circ"),
  (r"\frac{270}7\text{ degrees}", r"$\frac{270}7$"),
  (r"\sin^2 t", r"1-\cos^2 t"),
  ("2", r"\sqrt[3]{7+5\sqrt{2}}-\sqrt[3]{5\sqrt{2}-7}"),
  *[(r"\frac72", x) for x in ("3 1/2", r"3\,1/2", r"3\frac12", r"3½")],
  (r"(1, \frac52)", r"(1,2\tfrac{1}{2})"),
  (r"-\frac{5}{2}x", r"-2\frac12 x"),
  *[("5", "5e0"), ("3e8", "300000000"), ("1.5e-3", "0.0015"), ("2e-9", "2E-9")],
  ("(0,1]", r"(0,1]\quad\text{(units)}"),
  *[("12:05", r"12\!:\!05"), ("2:3", "4:6"), ("-1,3,3", "x = 3, 6/2, -1")],
  *[("12", "１２"), ("12", "€12"), ("12", r"£12.00"), ("7", "7,"), ("7", "7;")],
  *[(r"(1,2)\cup[3,4)", rf"(1,2) {x} [3,4)") for x in ("or", r"\text{ or }")],
  (r"\left(1,2\right) \text{ or }(3,4)", r"(1,2)\cup(3,4)"),
  *[(r"-1\le x\le 1", x) for x in (r"|x|\le 1", r"\left|x\right| \leq 1")],
  (r"|x-2|<\frac{1}{2}", r"\frac32<x<\frac52"),
  (
    r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}",
    r"\begin{bmatrix}1\\2\end{bmatrix}",
  ),
]
UNEQUAL = [
  (r"\frac{1}{3}", "0.33"),
  ("2", r"\pm 2"),
  ("2", "The final answer is 2. I hope"),
  ("2", "** $2$"),
  ("2", r"\text{either } 2 \text{ or } 3"),
  ("2", r"\sqrt[ 2"),
  ("11111111100", "333"),
  ("1000200", "1 000 2"),
  ("1", "1 100/300"),
  ("5.5", r"5\text{ h }30\text{ min}"),
  ("5", r"5\text{ cm}, 6\text{ cm}"),
  ("4t", "4"),
  ("5", "5 pi"),
  ("5", r"5\mathrm{i}"),
  (r"\{1,2\}", r"x \in (1,2)"),
  (r"\left\{1,2\right\}", r"\left(1,2\right)"),
  ("0.5", "5\\%"),
  ("10^{80}", "10^{80}+1"),
  ("0", "10^{-80}"),
  (r"\sqrt{2}", r"\frac{665857}{470832}"),
  (r"\frac32", "3 1/2"),
  *[("0", "5e0"), ("0", "7e000"), ("2e-9", "1e-9"), ("2e-9", "0.000000001")],
  *[("12:05", "12:5"), ("4:15", "8:30")],
  *[("1,1,2", "1,2"), ("1,2", "1,1,2"), ("-1,3,3", "-1,-1,3")],
  (r"(1,2)\cup(3,4)", r"(1,2)\text{ or }(3,5)"),
  (r"-1\le x\le 1", "|x|<1"),
]


@pytest.mark.parametrize("pairs, value", [(EQUAL, 1.0), (UNEQUAL, 0.0)])
def test_equal_answers_are_right_and_others_wrong(math, pairs, value):
  earned = grade(math, pairs)
  assert [p for p, x in zip(pairs, earned, strict=True) if x != value] == []


def test_two_numbers_side_by_side_equal_nothing(math):
  """Neither their sum nor product, nor one of them, nor both in a row."""
  rows = [
    *["7{}5", "{{7}}{}{{5}}", "(7){}(5)", "7{}(5)", r"7{}\frac{{5}}{{1}}"],
    *["[7]{}[5]", r"\left(7\right){}5", r"\text{{7}}{}5", r"7{}\text{{5}}"],
  ]
  gaps = [" ", r"\quad ", r"\qquad ", r"\, ", r"\ ", r"\ldots ", r"\text{ } "]
  answers = [row.format(gap) for row in rows for gap in (*gaps, "")]
  answers.remove("75")
  golds = ["12", "35", "7", "5", "75", "7, 5"]
  pairs = [(gold, answer) for answer in answers for gold in golds]
  earned = grade(math, pairs)
  assert [p for p, x in zip(pairs, earned, strict=True) if x] == []
  assert grade(math, [(x, x) for x in answers]) == [1.0] * len(answers)


def test_only_the_last_box_counts(math):
  text = r"$\boxed{0.5}$? No, the final answer is $\boxed{0.6}$, not $0.5$."
  golds = [r"\frac{1}{2}", r"\frac{3}{5}", "0.6"]
  graded = math.grade(golds, [text, text, "It is $0.6$."], golds)
  assert graded.rewards.tolist() == [0.0, 1.0, 0.0]
  assert graded.counts["unboxed"] == 1


def test_unreadable_answers_are_counted(math):
  long = "0" * MAX_ANSWER_CHARS + "5"
  answers, golds = ["**5**", "5", long, "5"], ["5", "5", "5", "**5**"]
  graded = math.grade(golds, [*map(boxed, answers)], golds)
  assert graded.rewards.tolist() == [0.0, 1.0, 0.0, 0.0]
  assert graded.counts["unparsed"] == 3


def rows(name: str) -> list[dict]:
  path = DATA / name
  with (gzip.open if path.suffix == ".gz" else open)(path, "rt") as lines:
    return [json.loads(line) for line in lines]


@needs_data
@pytest.mark.parametrize("name", ["math500.jsonl", "gsm8k_test.jsonl"])
def test_gold_answers_equal_themselves_in_other_notations(math, name):
  golds = [row["answer"] for row in rows(name)[:300]]
  styles = [
    "{}",
    "${}$.",
    "\u200b {}\u00a0",
    r"\displaystyle {}",
    r"\color{{blue}}{{{}}}",
    r"\approx {}",
  ]
  pairs = [(gold, style.format(gold)) for style in styles for gold in golds]
  earned = grade(math, pairs)
  assert [p for p, x in zip(pairs, earned, strict=True) if not x] == []


@needs_data
def test_solutions_earn_their_answers(math):
  golds = [row["answer"] for row in rows("math_test.jsonl")]
  solutions = [r["solution"] for r in rows("math_test.solutions.jsonl.gz")]
  assert math.grade(golds, solutions, golds).rewards.tolist() == [1.0] * 5000


@needs_data
def test_other_answers_earn_nothing(math):
  """In 499 pairs of neighbours, a single one is equal with different texts."""
  golds = [row["answer"] for row in rows("math500.jsonl")]
  pairs = [*itertools.pairwise(golds)]
  earned = zip(pairs, grade(math, pairs), strict=True)
  assert [(g, a) for (g, a), x in earned if x and g != a] == [("5", "x=5")]
