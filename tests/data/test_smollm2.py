"""Problems of configs/smollm2.py."""

import re

from dppo_jax.configs import smollm2, smollm2_words
import pytest

PARTS = {
  "single": (smollm2.single, smollm2.single_test),
  "words": (smollm2.words, smollm2.words_test),
}


@pytest.mark.parametrize("name", PARTS)
def test_no_problem_is_both_trained_on_and_held_out(name):
  train, test = ([row["problem"] for row in rows()] for rows in PARTS[name])
  assert len(set(train)) == len(train) > 4 * len(test) > 0
  assert not set(train) & set(test)


def test_calculations_have_their_results():
  checked = 0
  for row in (*smollm2.single(), *smollm2.words()):
    if match := re.match(r"What is (.+)\?", row["problem"]):
      expression = match[1].replace("x", "*")
      assert re.fullmatch(r"[\d +*-]+", expression)
      assert eval(expression) == int(row["answer"])
      checked += 1
  assert checked > 2 * smollm2.NUM_CALCULATIONS


def test_the_second_run_starts_where_the_first_one_ends():
  first, second = smollm2.get_config(), smollm2_words.get_config()
  assert second.sft.from_run == f"runs/smollm2-dppo-seed0@{first.steps}"
