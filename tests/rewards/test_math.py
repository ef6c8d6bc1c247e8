"""Finding the answer in a completion, and which answers are equal."""

from collections.abc import Iterator
from fractions import Fraction
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


def differences(math: Grader, pairs: list[tuple[str, str]], value: float):
  """Returns the pairs with another value."""
  earned = grade(math, pairs)
  return [x for x, y in zip(pairs, earned, strict=True) if y != value]


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
  *[("0.005", r"\frac{1}{2}\%"), (r"\frac13", r"33.\overline{3}\%")],
  *[("0.125", r"12\frac12\%"), (r"66\frac{2}{3}\%", r"\frac{2}{3}")],
  *[("x=3,y=4", "3,4"), ("x=3,y=4", "(3,4)"), ("x=3,y=4", "y=4, x=3")],
  *[("x=1,x=2", "2,1"), (r"x=3, y=\frac12", "3, 0.5")],
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
  *[("57", r"0.57\times100"), (r"\frac{11}{10}", r"\frac{3.3}{3}")],
  *[("x=110", r"x=1.1\times10^2"), (r"x=\frac13", "x=0.333333")],
  *[(r"(\frac16, 110)", r"(0.166667, 1.1\times10^2)")],
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
  *[("0", "0.0000001"), (r"\frac{1}{30000}", "0.000033"), ("1", "0.999999")],
  *[(r"\frac{2}{3}", "0.666666"), ("1000000", "1000000.4")],
  ("10^{80}", "10^{80}+1"),
  ("0", "10^{-80}"),
  (r"\sqrt{2}", r"\frac{665857}{470832}"),
  (r"\frac32", "3 1/2"),
  *[("0", "5e0"), ("0", "7e000"), ("2e-9", "1e-9"), ("2e-9", "0.000000001")],
  *[("12:05", "12:5"), ("4:15", "8:30")],
  *[("x=1,x=2,y=3", "1,3"), ("x=3,y=4", "4,3")],
  *[("x=1,y=2", "(2,1)"), ("a=1,b=2,c=3", "3,2,1")],
  ("50", r"\frac12\%"),
  *[("1010_2", "1010_3"), ("12_{5}", r"12_{\text{7}}"), ("12_5", "13_5")],
  *[("1,1,2", "1,2"), ("1,2", "1,1,2"), ("-1,3,3", "-1,-1,3")],
  (r"(1,2)\cup(3,4)", r"(1,2)\text{ or }(3,5)"),
  (r"-1\le x\le 1", "|x|<1"),
]


@pytest.mark.parametrize("pairs, value", [(EQUAL, 1.0), (UNEQUAL, 0.0)])
def test_equal_answers_are_right_and_others_wrong(math, pairs, value):
  assert differences(math, pairs, value) == []


HOLLOW = ["0=0", "1=0", "5=5", "x=x", "x+1=1+x", "x^2=-1", "0<1", "1<0"]


@pytest.mark.parametrize(
  "gold",
  [
    *[r"0.56 = 56\%", r"\frac{1}{2} = 0.5", "(x+1)^2 = x^2+2x+1", "x = y"],
    *["x^2+x+1 = 0", "x^2+y^2 = -1", "x^4 + 2 = 0", "x = 5", "x < 5"],
    *["x+y=1, x-y=1", r"\sin^2 x + \cos^2 x = 1", r"x \ne 3", "1 < 2 < 3"],
  ],
)
def test_relations_without_content_equal_no_other(math, gold):
  pairs = [(gold, answer) for answer in HOLLOW if answer != gold]
  assert differences(math, pairs, 0.0) == []
  assert grade(math, [(gold, gold)]) == [1.0]


def test_a_problem_is_no_answer(math):
  """An answer states the value of what the gold answer states it of."""
  restated = [
    *[("x=5", x) for x in ("x+5=10", "x-5=0", "0=5-x", "2x=10", "x+1=5+1")],
    *[(r"x \le 3", "x+1 \\le 4"), ("1<x<2", "2<x+1<3"), ("x>1", "0<x-1")],
    *[("x=2, y=3", "x+1=3, y+1=4"), (r"\frac32<x<\frac52", r"|x-2|<\frac12")],
  ]
  assert differences(math, restated, 0.0) == []
  stated = [("x=5", x) for x in ("5", "5=x", r"x=\frac{10}{2}", "x=6-1=5")]
  stated += [(r"x \le 3", r"3 \ge x"), ("x>1", "1<x"), ("x<1", "-x>-1")]
  # Of two variables no side is the problem's.
  stated += [("y=2x+1", "2x-y+1=0"), ("x+y=3", "2x+2y=6"), ("x=5", "x=5.0")]
  assert differences(math, stated, 1.0) == []


@pytest.mark.parametrize(
  "rows",
  [
    ["(1,2,3)", "(1,2,3)", "(4,5,6)"],
    [r"(1,2,\frac12)", "(1,1,0)", "(1,1,0)", "(0,0,3)"],
    ["(1,2)", "(3,4)"],
    ["(1,2)", "(3,4)", "(3,4)"],
    ["(1,x)", "(y,2)"],
  ],
  ids=str,
)
def test_lists_of_tuples_have_no_order(math, rows):
  lists = [", ".join(x) for x in {*itertools.permutations(rows)}]
  pairs = [(x, y) for x in lists for y in lists]
  if len({*rows}) == len(rows):  # a set has no repeats
    sets = [rf"\left\{{{x}\right\}}" for x in lists]
    pairs += [z for x in lists for y in sets for z in ((x, y), (y, x))]
  assert differences(math, pairs, 1.0) == []
  other = [(x, ", ".join([*rows[:-1], "(7,8)"])) for x in lists]
  other += [(x, ", ".join(rows[:-1])) for x in lists]
  assert differences(math, other, 0.0) == []


@pytest.mark.parametrize("zeros", [0, 2, 5, 8, 30, -3, -19])
def test_scientific_notation_is_exact(math, zeros):
  """For every number of two digits, as an integer, decimal and fraction."""
  pairs = []
  for digits in range(11, 100, 1 if zeros == 2 else 7):
    mantissa, power = f"{digits // 10}.{digits % 10}", f"10^{{{zeros}}}"
    exact = Fraction(digits, 10) * Fraction(10) ** zeros
    fraction = rf"\frac{{{exact.numerator}}}{{{exact.denominator}}}"
    texts = [fraction, rf"{mantissa}\times{power}", f"{mantissa}e{zeros}"]
    pairs += [*itertools.permutations(texts, 2)]
  assert differences(math, pairs, 1.0) == []
  other = rf"1.61\times10^{{{zeros}}}", rf"1.6\times10^{{{zeros}}}"
  percents = tuple(rf"{x}\%" for x in other)
  lists = tuple(f"(1, {x})" for x in other)
  for pair in (other, percents, lists):
    assert grade(math, [pair, pair[::-1], (pair[0],) * 2]) == [0.0, 0.0, 1.0]


def test_a_choice_equals_its_letter_and_its_text(math):
  choices = [r"\textbf{(E)}\ 12", r"\text{(E) }12", "(E) 12", r"(E)\quad 12"]
  pairs = [*itertools.product(choices, choices)]
  for part in ("E", r"\text{E}", r"\text{(E)}", "12", "12.0"):
    pairs += [z for x in choices for z in ((part, x), (x, part))]
  assert differences(math, pairs, 1.0) == []
  other = [r"\textbf{(D)}\ 12", r"\textbf{(E)}\ 13", "(D)", "13", "(D) 13"]
  pairs = [(x, y) for x in choices for y in other]
  pairs += [("E", other[0]), ("12", other[1])]
  assert differences(math, pairs, 0.0) == []
  hedged = ["(A) (B)", r"\text{(A)}\ \text{(B)}", "(A) B", r"(A)\text{ or B}"]
  for answer in hedged:  # no second guess
    assert sum(grade(math, [("A", answer), ("B", answer)])) <= 1


def test_gold_answers_that_cannot_be_parsed_are_compared_as_text(math):
  gold = r"2007 + \frac\pi 2"
  same = ["2007+\\frac\\pi2", r"2007\;+ \dfrac\pi 2", rf"\displaystyle {gold}"]
  assert differences(math, [(gold, x) for x in same], 1.0) == []
  other = [r"2007+\frac\pi3", r"200 7+\frac\pi2+1", "2007"]
  assert differences(math, [(gold, x) for x in other], 0.0) == []


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
  assert differences(math, pairs, 0.0) == []
  assert grade(math, [(x, x) for x in answers]) == [1.0] * len(answers)


def test_only_the_last_box_counts(math):
  text = r"$\boxed{0.5}$? No, the final answer is $\boxed{0.6}$, not $0.5$."
  golds = [r"\frac{1}{2}", r"\frac{3}{5}", "0.6"]
  graded = math.grade(golds, [text, text, "It is $0.6$."], golds)
  assert graded.rewards.tolist() == [0.0, 1.0, 0.0]
  assert graded.counts["unboxed"] == 1


def test_unreadable_answers_are_counted(math):
  long = "0" * MAX_ANSWER_CHARS + "5"
  answers, golds = ["*5", "5", long, "5"], ["5", "5", "5", "*5"]
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
  assert differences(math, pairs, 1.0) == []


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
