"""Answers that count as equal, and the tables of the results."""

import pytest

from dppo_jax.analysis import tables
from dppo_jax.eval import page
from dppo_jax.eval.sets import canonical_answer


@pytest.mark.parametrize(
  "answers",
  [
    ["0.5", "1/2", r"\frac{1}{2}", r"\dfrac{2}{4}", " 0.50 "],
    ["7", "007", "7.0", "7/1"],
    ["1,000", "1000"],
    ["x+1", " x+1", "$x+1$"],
    ["1/0"],
    ["9" * 31],
    [None],
  ],
)
def test_equal_answers_have_one_canonical_text(answers):
  others = ["0.51", "8", "1,00", "x-1", "0/1"]
  canonical = {canonical_answer(x) for x in answers}
  assert len(canonical) == 1
  assert not canonical & {canonical_answer(x) for x in others}


def test_tables_show_every_estimate():
  estimates = {"greedy": {"value": 0.5, "low": 0.15, "high": 0.85}}
  sets = {"aime": {"problems": 4, "estimates": estimates}}
  row = "| aime | 4 | greedy | 0.500 | 0.150 to 0.850 |"
  assert row in page.table(sets)
  lines = page.table(sets, tables.aligned).splitlines()
  assert lines[1].split()[:4] == ["aime", "4", "greedy", "0.500"]
