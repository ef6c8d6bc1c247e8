"""Answers that are equal are one; who gives none casts no vote."""

import numpy as np

from dppo_jax import rewards
from dppo_jax.eval import votes


def _count(answers, right=(), functions="math"):
  is_right = [[x in right for x in row] for row in answers]
  with rewards.Grader(functions, 1) as grader:
    return votes.count(answers, is_right, grader.same_answers).tolist()


def test_equal_answers_are_one_whatever_their_text():
  answers = [
    ["0.5", r"\frac{1}{2}", "1/2", None, "2"],
    ["x+1", "1+x", "x", "x.", "x-1"],
    ["07", "7", "8", r"7.0", None],
  ]
  assert _count(answers) == [
    [1, 1, 1, -1, 2],
    # x is the most frequent text, so it is compared first.
    [2, 2, 1, 1, 3],
    [1, 1, 2, 1, -1],
  ]


def test_without_mathematics_equal_texts_are_one():
  answers = [["0.5", r"\frac{1}{2}", " 0.5", "0.5."]]
  assert _count(answers, functions="exact") == [[1, 2, 1, 1]]


def test_what_is_right_is_one_answer_without_asking():
  asked = []

  def same(firsts, seconds):
    asked.extend(zip(firsts, seconds, strict=True))
    return [False] * len(firsts)

  answers = [["1/2", "0.5", "3", "4", "a", "b"]]
  is_right = [[True, True, False, False, False, False]]
  found = votes.count(answers, is_right, same)
  np.testing.assert_array_equal(found, [[0, 0, 1, 2, 3, 4]])
  # Neither the right ones nor two integers are compared.
  assert asked == [("3", "a"), ("3", "b"), ("4", "a"), ("4", "b"), ("a", "b")]


def test_problems_do_not_mix_and_may_have_no_answers():
  assert _count([["1", "2"], ["2", "1"], [None, None]], functions="exact") == [
    [1, 2],
    [1, 2],
    [-1, -1],
  ]
