"""Completions made to hang, crash, fill or take over the grading process.

The functions that run in the trainer's process grade all of them, `math` every
fifth; experiments/07_grading graded all by all functions, which takes minutes.
"""

import numpy as np
import pytest

from dppo_jax.rewards import Grader, last_boxed
from dppo_jax.rewards.math_answers import MAX_CHARS, outcome
from tests.helpers import hostile

# What a completion of no value may count under: neither as an error of ours
# nor as nonfinite.
OUTCOMES = {"right", "wrong", "unboxed", "unparsed", "timeouts", "crashes"}


@pytest.fixture(scope="module")
def mark(tmp_path_factory):
  """A file that no completion manages to write."""
  path = tmp_path_factory.mktemp("hostile") / "injected"
  yield path
  assert not path.exists()


@pytest.fixture(scope="module")
def texts(mark):
  generated = hostile.completions(str(mark), long=200_000)
  assert len(generated) >= 390
  return generated


def test_the_trainers_process_grades_any_text(texts):
  """Grades in this process: the contents of a box are never executed."""
  completions = [*texts.values()]
  with Grader("exact,last_number,boxed") as grader:
    graded = grader.grade(
      [""] * len(texts), completions, ["no such answer"] * len(texts)
    )
  has_box = [last_boxed(text) is not None for text in completions]
  np.testing.assert_array_equal(graded.values["boxed"], has_box)
  assert not graded.correct.any()
  assert sum(has_box) > 300


@pytest.mark.slow
def test_a_child_grades_any_text_or_is_killed(texts):
  """One by one, with a deadline that many miss; the trainer continues."""
  chosen = [*texts.values()][::5]
  spec = "math,exact,last_number,boxed"
  with Grader(spec, 3, timeout_seconds=0.3) as grader:
    for gold in ("7", r"\{1, x^2+\sqrt{2}\}"):
      graded = grader.grade([""] * len(chosen), chosen, [gold] * len(chosen))
      assert sum(graded.counts[x] for x in OUTCOMES) == len(chosen)
      assert graded.counts["errors"] == graded.counts["nonfinite"] == 0
      assert np.isfinite(graded.rewards).all()
      chosen = chosen[::8]


def test_sympy_errors_count_as_unparsed(texts):
  """Too deep a recursion, for example, counts as an unparsed answer."""
  assert outcome(texts["factorial 990 deep"], "7") == "unparsed"


def test_only_the_end_of_a_huge_text_is_searched():
  """Ten million braces cost no more than one million."""
  assert last_boxed(r"\boxed{7}" + " " * MAX_CHARS) is None
  assert last_boxed("{" * MAX_CHARS + r"\boxed{7}") == "7"
