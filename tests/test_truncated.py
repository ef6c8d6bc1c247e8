"""Completions without a stop, left out of the loss: exact by enumeration."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dppo_jax import methods
from dppo_jax.algo import objectives
from dppo_jax.rng import Stage, rng_at
from dppo_jax.step import select
from tests.helpers import small

# Four completions of one prompt, the last one truncated.
PROB = np.array([0.4, 0.2, 0.1, 0.3])
REWARD = np.array([1.0, 0.0, 0.25, 0.9])
STOPS = np.array([True, True, True, False])
SCORE = np.eye(4) - PROB  # gradient of the log-probability to the logits
GROUP = 3

REWARDS = [[1, 0, 0], [0, 1, 1], [1, 1, 1]]
STOPPED = [[True, True, False], [True, True, False], [True, False, False]]


def _select(rollout, rewards, objective, method=None):
  return _compiled(rollout, np.float32(rewards), objective, method, True)


@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def _compiled(rollout, rewards, objective, method, is_masked):
  return select.select(
    rng_at(jax.random.key(0), 1, Stage.COMPLETIONS),
    small.prompts(len(rewards)),
    rollout,
    rewards,
    spec=small.spec(
      method=method or methods.grpo(),
      objective=objective,
      mask_truncated=is_masked,
    ),
  )


def _rollout():
  rollout = small.rollout(small.prompts())
  return rollout.replace(is_stopped=jnp.array(STOPPED))


@pytest.mark.parametrize(
  ("objective", "factor"),
  [
    (objectives.rloo(), lambda num: num * (num > 1)),
    (objectives.dr_grpo(), lambda num: np.maximum(num - 1, 0)),
  ],
)
def test_the_gradient_is_of_the_mean_reward_given_a_stop(objective, factor):
  """Enumerates every group, as the prompts of one batch."""
  outcomes = np.array([*itertools.product(range(4), repeat=GROUP)])
  rollout = small.rollout(small.prompts(len(outcomes)), GROUP)
  rollout = rollout.replace(is_stopped=jnp.array(STOPS[outcomes]))
  *_, summary = _select(rollout, REWARD[outcomes], objective)
  factors = np.where(summary.trained_lengths > 0, summary.advantages, 0)
  sums = np.einsum("ni,nij->nj", factors, SCORE[outcomes])
  actual = PROB[outcomes].prod(axis=1) @ sums / GROUP

  given = np.where(STOPS, PROB, 0) / PROB[STOPS].sum()
  gradient = given * (REWARD - given @ REWARD)  # of the mean given a stop
  num = STOPS[outcomes].sum(axis=1)
  fraction = PROB[outcomes].prod(axis=1) @ factor(num) / GROUP
  np.testing.assert_allclose(actual, fraction * gradient, atol=1e-6)
  of_all = PROB * (REWARD - PROB @ REWARD)
  assert np.abs(actual / fraction - of_all).max() > 0.05


@pytest.mark.parametrize("method", ["grpo", "dppo", "cppo", "pods", "neyman"])
def test_truncated_completions_change_nothing(method):
  """Neither rewards nor tokens of theirs; cppo and pods choose without them."""
  rollout, objective = _rollout(), objectives.grpo(beta=0.1)
  is_cut = ~jnp.array(STOPPED)
  method = methods.METHODS[method]()
  if method.budget:
    method = methods.neyman(completion_budget=0.5)
  other = rollout.replace(
    tokens=jnp.where(is_cut[..., None], 3, rollout.tokens),
    logprobs=jnp.where(is_cut[..., None], -9.0, rollout.logprobs),
  )
  rewards = jnp.where(is_cut, 7.0, jnp.float32(REWARDS))
  one = _select(rollout, REWARDS, objective, method)
  two = _select(other, rewards, objective, method)
  for want, actual in zip(one[:2], two[:2], strict=True):
    jax.tree.map(np.testing.assert_array_equal, actual, want)
  assert not (np.asarray(two[3].trained_lengths)[is_cut]).any()
  assert (np.asarray(two[3].trained_lengths) > 0).any()


def test_shares_and_denominators_count_truncated_completions():
  """With a KL penalty, weights are those of the full batch."""
  rollout, stopped = _rollout(), np.array(STOPPED)
  lengths = np.asarray(rollout.lengths)
  want = {"grpo": stopped.sum(), "dr_grpo": lengths[stopped].sum() / 5}
  want["dapo"] = lengths[stopped].sum() / lengths.mean()
  for name, total in want.items():
    objective = objectives.OBJECTIVES[name](beta=0.1)
    batch, *_ = _select(rollout, REWARDS, objective)
    np.testing.assert_allclose(batch.weights.sum(), total, rtol=1e-6)


def test_without_truncated_completions_nothing_is_masked():
  rollout, objective = small.rollout(small.prompts()), objectives.grpo()
  batch, num_micro, *_ = _select(rollout, REWARDS, objective)
  rewards = np.float32(REWARDS)
  want, want_micro, *_ = _compiled(rollout, rewards, objective, None, False)
  jax.tree.map(np.testing.assert_array_equal, batch, want)
  assert num_micro == want_micro
