"""Supervised fine-tuning: its rate, and what ends it."""

import numpy as np
import pytest

from dppo_jax import data
from dppo_jax.errors import UserError
from dppo_jax.metrics import progress
from dppo_jax.run import sft
from dppo_jax.run.setup import setup_run
from tests.helpers import commands

pytestmark = pytest.mark.slow


def _run(**options):
  """A small run, and a function that fine-tunes its first weights."""
  tiny = {
    "model__shape__layers": 1,
    "model__shape__embed": 16,
    "model__shape__mlp": 32,
    "model__shape__head_dim": 8,
    "data__train": "arithmetic:20:1",
    "data__prompts_per_step": 8,
    "data__eval": "",
  }
  run = setup_run(commands.config("arithmetic:grpo", **tiny | options))
  bar = progress.Progress()
  train = lambda run, steps, rate=0.0: sft.tune(
    run, run.initial_params(), steps, lambda line: None, bar, rate
  )
  return run, train


@pytest.fixture
def rates(monkeypatch):
  """Rates that optimizers are made with."""
  seen, make = [], sft.make_optimizer

  def record(rate, *args, **options):
    seen.append(rate)
    return make(rate, *args, **options)

  monkeypatch.setattr(sft, "make_optimizer", record)
  return seen


def test_the_rate_of_a_checkpoint_is_low_unless_it_is_given(rates):
  run, train = _run()
  train(run, 1)
  # The weights are random, but look like a checkpoint's.
  stored = run._replace(path="checkpoint")
  sft.tune(stored, run.initial_params(), 1, print, progress.Progress())
  train(run, 1, rate=0.5)
  assert rates == [3e-3, 1e-5, 0.5]


@pytest.mark.parametrize("steps", [3, 12])
def test_a_single_gradient_that_is_not_finite_ends_it(steps):
  """Fewer in a row than training allows, at any number of steps."""
  run, train = _run()
  with pytest.raises(UserError, match=r"1e\+30 .* config.sft.learning_rate"):
    train(run, steps, rate=1e30)  # more than an option may be


def test_a_solution_with_a_token_that_the_model_lacks_is_named(monkeypatch):
  """Its embedding would be NaN."""
  run, train = _run()
  tokens = np.zeros((2, 20, 4), np.int32)
  tokens[0, 7, 2] = run.spec.model.vocab
  lengths = np.full((2, 20), 4)
  monkeypatch.setattr(
    data.problems, "tokenize_solutions", lambda *args: (tokens, lengths)
  )
  message = f"solution of {run.train_set.names[7]} has the token "
  with pytest.raises(UserError, match=message):
    train(run, 1)
