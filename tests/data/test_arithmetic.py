"""The default task: correct answers, an even mix, reproducible."""

import re

import numpy as np
import pytest

from dppo_jax import data
from dppo_jax.data import CharacterTokenizer, arithmetic
from dppo_jax.errors import UserError
from tests.helpers.problems import ARITHMETIC


def test_distinct_numbers_are_distinct_problems():
  for operations, size in ((1, 272), (2, 4624)):
    count = sum((272, 4624)[:operations])
    texts = {p.problem for p in arithmetic.make(0, count, operations)}
    assert len(texts) == count
    assert sum(len(re.findall("[+-]", t)) == operations for t in texts) == size


def test_answers_and_work_are_right_and_stay_in_range():
  for row in arithmetic.make(3, 3000, 6):
    *steps, last = row.solution.split(";")
    operands = re.split(r"[+-]", row.problem.removesuffix("="))
    signs = re.findall(r"[+-]", row.problem)
    value = int(operands[0])
    for sign, operand, step in zip(signs, operands[1:], steps, strict=True):
      result = value + int(operand) if sign == "+" else value - int(operand)
      assert step == f"{value}{sign}{operand}={result}"
      assert {value, result, int(operand)} <= set(range(16))
      value = result
    assert row.answer == str(value)
    assert last == arithmetic.boxed(row.answer) == f"\\boxed{{{value}}}"


def test_classes_are_equally_frequent_until_one_is_used_up():
  def mix(rows):
    return np.bincount([len(re.findall("[+-]", p.problem)) for p in rows])

  assert mix(arithmetic.make(0, 602, 6)).tolist() == [0, *[100] * 4, 101, 101]
  rows = arithmetic.make(0, 4096, 6)
  assert mix(rows).tolist() == [0, 272, 764, 765, 765, 765, 765]
  train = arithmetic.read("arithmetic", 0, held_out=False)
  held_out = arithmetic.read("arithmetic", 0, held_out=True)
  np.testing.assert_allclose(mix(held_out), mix(rows) / 8, atol=1)
  np.testing.assert_allclose(mix(held_out[:64]), mix(rows) / 64, atol=1)
  assert held_out + train == rows and len(train) == 3584


def test_train_and_eval_sets_are_disjoint():
  train, eval_sets = data.load(CharacterTokenizer(), 0, **ARITHMETIC)
  eval_set = eval_sets["arithmetic"]
  assert (len(train), len(eval_set)) == (350, 50)
  assert not set(train.problems) & set(eval_set.problems)
  assert len({*train.names, *eval_set.names}) == 400
  assert eval_set.report.endswith("; 0 also in train")
  assert eval_set.columns["answer"] == eval_set.answers


def test_eval_set_does_not_depend_on_training_or_its_limit():
  tokenizer = CharacterTokenizer()
  _, expected = data.load(tokenizer, 0, **ARITHMETIC)
  none, alone = data.load(tokenizer, 0, **ARITHMETIC, trains=False)
  assert none is None
  assert alone["arithmetic"].problems == expected["arithmetic"].problems
  _, some = data.load(tokenizer, 0, **ARITHMETIC, eval_limit=5)
  assert some["arithmetic"].problems == expected["arithmetic"].problems[:5]


def test_seed_alone_decides_the_problems():
  assert arithmetic.make(5, 300, 3) == arithmetic.make(5, 300, 3)
  assert arithmetic.make(5, 300, 3) != arithmetic.make(6, 300, 3)
  # A change here means that no earlier run can be repeated.
  first = [p.problem for p in arithmetic.make(0, 4096, 6)[:3]]
  assert first == ["2+11-6-5=", "11-10+4+10-4=", "13-4+2+3+0+1="]


@pytest.mark.parametrize("numbers", ["273:1", "1:1", "10:0", "10:13"])
def test_impossible_numbers_name_the_option(numbers):
  source = f"arithmetic:{numbers}"
  with pytest.raises(UserError, match=f"config.data: {source} must"):
    arithmetic.read(source, 0, held_out=False)
