"""The default task: right answers, a fair mix, the same every time."""

import re

import numpy as np
from problems import ARITHMETIC
import pytest

from dppo_jax import data
from dppo_jax.data import CharacterTokenizer, arithmetic


def test_every_number_of_a_class_is_another_problem():
  for operations, size in ((1, 272), (2, 4624)):
    count = sum((272, 4624)[:operations])
    made = arithmetic.make(0, count, operations)
    texts = {p.problem for p in made}
    assert len(texts) == count
    assert sum(len(re.findall("[+-]", t)) == operations for t in texts) == size


def test_answers_and_work_are_right_and_stay_in_range():
  for made in arithmetic.make(3, 3000, 6):
    *steps, last = made.solution.split(";")
    operands = re.split(r"[+-]", made.problem.removesuffix("="))
    signs = re.findall(r"[+-]", made.problem)
    value = int(operands[0])
    for sign, operand, step in zip(signs, operands[1:], steps, strict=True):
      result = value + int(operand) if sign == "+" else value - int(operand)
      assert step == f"{value}{sign}{operand}={result}"
      assert {value, result, int(operand)} <= set(range(16))
      value = result
    assert made.answer == str(value)
    assert last == arithmetic.boxed(made.answer) == f"\\boxed{{{value}}}"


def test_numbers_of_operations_share_alike_until_one_runs_out():
  def mix(made):
    return np.bincount([len(re.findall("[+-]", p.problem)) for p in made])

  assert mix(arithmetic.make(0, 602, 6)).tolist() == [0, *[100] * 4, 101, 101]
  made = arithmetic.make(0, 4096, 6)
  assert mix(made).tolist() == [0, 272, 764, 765, 765, 765, 765]
  train, eval_set = arithmetic.split(made)
  np.testing.assert_allclose(mix(eval_set), mix(made) / 8, atol=1)
  assert mix(train).sum() == 3584
  np.testing.assert_allclose(mix(eval_set[:64]), mix(made) / 64, atol=1)


def test_train_and_eval_set_problems_are_disjoint():
  train, eval_sets = data.load(CharacterTokenizer(), 0, **ARITHMETIC)
  eval_set = eval_sets["arithmetic"]
  assert (len(train), len(eval_set)) == (350, 50)
  assert not set(train.problems) & set(eval_set.problems)
  assert len({*train.names, *eval_set.names}) == 400
  assert eval_set.report.endswith("; 0 also in train")
  assert eval_set.columns["answer"] == eval_set.answers


def test_the_seed_alone_decides_the_problems():
  assert arithmetic.make(5, 300, 3) == arithmetic.make(5, 300, 3)
  assert arithmetic.make(5, 300, 3) != arithmetic.make(6, 300, 3)
  # A change here means that no earlier run can be repeated.
  first = [p.problem for p in arithmetic.make(0, 4096, 6)[:3]]
  assert first == ["2+11-6-5=", "11-10+4+10-4=", "13-4+2+3+0+1="]


def test_limits_do_not_move_the_border_between_train_and_eval_set():
  few = {**ARITHMETIC, "train_limit": 10, "eval_limit": 5}
  all_train, all_eval = data.load(CharacterTokenizer(), 0, **ARITHMETIC)
  train, few_eval = data.load(CharacterTokenizer(), 0, **few)
  assert train.problems == all_train.problems[:10]
  (few_eval,), (all_eval,) = few_eval.values(), all_eval.values()
  assert few_eval.problems == all_eval.problems[:5]


@pytest.mark.parametrize(
  ("count", "max_operations", "knob"),
  [
    (273, 1, "num_arithmetic"),
    (1, 1, "num_arithmetic"),
    (10, 0, "max_operations"),
    (10, 13, "max_operations"),
  ],
)
def test_impossible_arithmetic_names_the_knob(count, max_operations, knob):
  with pytest.raises(ValueError, match=rf"config\.data\.{knob} is \d+"):
    arithmetic.make(0, count, max_operations)
