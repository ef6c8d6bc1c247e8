"""Texts that normalisation keeps, and its linear time."""

import json
import pathlib
import re

from hypothesis import given
from hypothesis import strategies as st
import pytest

from dppo_jax.rewards.notation import normalize

DATA = pathlib.Path(__file__).parents[3] / "shared" / "data"
PIECES = [*"0123 ,.~√²½°–{}^_$aA)", r"\,", r"\!", r"\text{ million}", "**", "€"]
PIECES += [
  r"\text{",
  r"\quad ",
  r"\left.",
  r"\(",
  "{,}",
  "\\",
  r"\mathbf{",
  "%",
]


@given(st.lists(st.sampled_from(PIECES)).map("".join))
def test_normalize_changes_only_what_it_must_and_only_once(text):
  plain = normalize(text)
  assert plain.isascii()
  assert normalize(f"  {text}\t") == plain


@pytest.mark.parametrize(
  "text",
  [
    *["1 2", "1 2/3", "1 100/300", r"\frac 1 200", "x 1 000", r"\log_2 100"],
    *[r"\{1,2\}", "(1, 2)", "{1}2{3}", "5_{10}", "0.3333"],
    *["1 000 0002", r"5\text{ hundredths}", r"\overline{AB}", "a-b"],
  ],
)
def test_normalize_leaves_alone(text):
  assert normalize(text) == text


PIECES_THAT_REPEAT = [
  *["√", "√(", "√1", "1 ", "1 000 ", r"1\;111", r"1\, 111", r"\color{", "{"],
  *["{}", "{a}", " ", r"\!", "1.", ".1", "1,111", "1 million", "⁰", "½"],
  *[r"1\overline{", r"0.1\bar", r"1 \text{ million ", r"\approx ", "11111"],
  *[
    r"\text{",
    r"\text{A. ",
    r"\text{1",
    "{,}1",
    "1{,}",
    "**",
    "**a",
    r"\quad ",
  ],
  *[r"\left.", r"\\[1", r"\mathbb R", r"^\circ ", "per cent", "1万", "1千克"],
  *[r"\operatorname{", r"\hspace{1", "{A.", "\\", "$", "1'000", r"{\rm ", "`"],
  *[r"\{ \}", "a\\!", "1 тыс. ", r"\circ C", "1\\! ", "., ", r"\begin{align"],
  *["1{,}111", "1,111+", "=1,111", r"\text{A, B", ", and", "^{'", "5 hundred "],
]


@pytest.mark.parametrize("piece", PIECES_THAT_REPEAT)
def test_normalize_takes_linear_time(piece):
  text = piece * (100_000 // len(piece))  # quadratic time would be an hour
  assert normalize(f"{{{text}{{") is not None


@pytest.mark.skipif(not DATA.is_dir(), reason=f"no {DATA}")
def test_distinct_gold_answers_stay_distinct():
  """On MATH, normalising drops blanks, sizes, fonts, `\\$` and full stops."""
  names = ["math500.jsonl", "math_test.jsonl", "math_train.jsonl"]
  golds = {
    json.loads(line)["answer"]
    for name in names
    for line in (DATA / name).read_text().splitlines()
  }
  marks = [
    *[(r",?\\!", ""), (r"\\[dt]frac", r"\\frac"), (r"\\(?:left|right|\$)", "")],
    *[(r"\\(?:mbox|textbf|mathrm)", r"\\text"), (r"\^\{\\circ\}", r"^\\circ")],
    *[(r"\{,\}", ""), (r"\\[,; ]|\s+", " ")],
    *[(r"\\(?:text|mathbf)\{(\d+)\}", r"\1")],
  ]
  texts = golds
  for pattern, new in marks:
    texts = {re.sub(pattern, new, text) for text in texts}
  texts = {text.strip().rstrip(".,").strip() for text in texts}
  assert len({normalize(gold) for gold in golds}) == len(texts)
