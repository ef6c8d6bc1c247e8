"""A specification whose parts do not fit each other is rejected."""

from unittest import mock

import jax
import pytest

from dppo_jax import data, methods, sharding
from dppo_jax.algo import PackingSpec, objectives
from dppo_jax.errors import UserError
from dppo_jax.rollout import Sampling
from dppo_jax.step.optimizer import make_optimizer
from dppo_jax.step.spec import StepSpec
from dppo_jax.step.train_step import TrainStep
from tests.helpers import small


def _spec(**changes) -> StepSpec:
  fields = {
    "mesh": sharding.make_mesh(),
    "platform": "cpu",
    "root_key": jax.random.key(0),
    "model": small.MODEL,
    "method": methods.grpo(),
    "objective": objectives.grpo(),
    "packing": PackingSpec(16, 2),
    "sampling": Sampling(8, (0,)),
    "optimizer": make_optimizer(1e-2, 10),
    "num_problems": 20,
    "prompt_tokens": 9,
    "num_prompts": 10,
    "group_size": 4,
  }
  return StepSpec(**(fields | changes))


EXACT = {"method": methods.greso(dynamic_sampling="exact")}
CONSTANT_BASELINE = objectives.grpo()._replace(
  advantage=lambda rewards, counted: rewards - 0.25
)


@pytest.mark.parametrize(
  "changes, message",
  [
    ({"prompt_tokens": 10}, "take 17 tokens but a packed row holds 16"),
    ({"overlong_tokens": 9}, "is 9 but must be at most .*max_tokens, 8"),
    ({"mini_batches": 3}, "is 10 but must be a multiple of .*mini_batches, 3"),
    (EXACT | {"num_prompts": 1}, "is 1 but must be at least 2"),
    (EXACT | {"objective": objectives.grpo(beta=0.5)}, "beta is 0.5 but exact"),
    (EXACT | {"objective": objectives.dapo()}, "mean length of completions is"),
    (EXACT | {"objective": CONSTANT_BASELINE}, "equal rewards has an advant"),
  ],
)
def test_parts_that_do_not_fit_are_rejected_if_something_is_trained(
  changes, message
):
  _spec(), _spec(**EXACT)
  _spec(**changes, optimizer=None)
  with pytest.raises(UserError, match=message):
    _spec(**changes)


def test_another_training_set_is_rejected():
  problems = mock.MagicMock(data.ProblemSet)
  problems.__len__.return_value = 3
  with pytest.raises(ValueError, match="is 20 but there are 3 problems"):
    TrainStep(_spec(), problems, None, None, {})
