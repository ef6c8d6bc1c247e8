"""The objectives as values: shares of tokens, advantages, checked arguments."""

import inspect
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dppo_jax.algo import objectives, policy_loss
from dppo_jax.errors import UserError
from dppo_jax.records import Selection
from tests.helpers import small

EVERY = {name: make() for name, make in objectives.OBJECTIVES.items()}


@jax.jit
def _shares(rollout):
  return {
    name: objective.token_share(rollout) for name, objective in EVERY.items()
  }


def test_token_shares_in_closed_form():
  rollout = small.rollout(small.prompts())
  lengths = np.asarray(rollout.lengths)
  shares = _shares(rollout)
  np.testing.assert_allclose(shares["grpo"], 1 / lengths, rtol=1e-6)
  np.testing.assert_array_equal(shares["gspo"], shares["grpo"])
  np.testing.assert_array_equal(shares["cispo"], shares["dapo"])
  np.testing.assert_array_equal(shares["rloo"], 1)
  np.testing.assert_allclose(shares["dapo"], 1 / lengths.mean(), rtol=1e-6)
  np.testing.assert_allclose(shares["dr_grpo"], 1 / 5, rtol=1e-6)
  for make in (objectives.dapo, objectives.cispo):
    constant = make(tokens_per_completion=8.0)
    np.testing.assert_array_equal(constant.token_share(rollout), 1 / 8)
  # Means over sequences and over tokens: their weights sum to 1.
  for name in ("grpo", "gspo", "dapo"):
    total = (np.asarray(shares[name]) * lengths).sum() / lengths.size
    np.testing.assert_allclose(total, 1.0, rtol=1e-6)


def _keep_prompts(rollout, keep, prob):
  keep = jnp.array(keep)
  return rollout.replace(
    kept=Selection(keep, jnp.array(prob, jnp.float32)),
    lengths=jnp.where(keep[:, None], rollout.lengths, 0),
  )


def test_the_mean_length_weighs_prompts_by_how_rarely_they_are_kept():
  whole = small.rollout(small.prompts())
  keep, prob = [True, False, True], [0.5, 0.1, 1.0]
  share = np.asarray(_shares(_keep_prompts(whole, keep, prob))["dapo"])
  first, _, last = np.asarray(whole.lengths).mean(axis=1)
  np.testing.assert_allclose(share, 3 / (2 * first + last), rtol=1e-6)
  nothing = _shares(_keep_prompts(whole, [False] * 3, prob))
  assert all(np.isfinite(share).all() for share in nothing.values())


def test_pruned_prompts_leave_a_known_denominator_exact():
  """Mean of the loss over all 2^3 choices of prompts, each kept or not."""
  whole = small.rollout(small.prompts())
  prob = np.array([0.3, 0.6, 0.9])
  # Each token is worth 1 + its prompt's number.
  worth = np.array([[1.0], [2.0], [3.0]])
  tokens = np.asarray(whole.lengths)

  def error(objective):
    share = jax.jit(objective.token_share)
    loss = lambda rollout, weight: (
      weight[:, None] * worth * tokens * np.asarray(share(rollout))
    ).sum()
    mean = 0.0
    for choice in itertools.product([False, True], repeat=3):
      keep = np.array(choice)
      chance = np.where(keep, prob, 1 - prob).prod()
      pruned = _keep_prompts(whole, keep, prob)
      mean += chance * loss(pruned, keep / prob)
    return abs(mean / loss(whole, np.ones(3)) - 1)

  assert error(objectives.dapo(tokens_per_completion=3.0)) < 1e-6
  assert error(objectives.cispo(tokens_per_completion=3.0)) < 1e-6
  for name in ("grpo", "dr_grpo", "gspo", "rloo"):
    assert error(EVERY[name]) < 1e-6
  # The mean length is that of the kept ones: documented as an estimate.
  assert error(objectives.dapo()) > 1e-2


@pytest.mark.parametrize("name", EVERY)
def test_equal_objectives_compile_once(name):
  again = objectives.OBJECTIVES[name]()
  assert again == EVERY[name] and hash(again) == hash(EVERY[name])


INVALID = {
  "clip_low": (0.0, np.nan),
  "clip_high": (-1.0,),
  "beta": (-0.1, np.inf, np.nan),
  "sampler_cap": (-0.5, 0.5),
  "tokens_per_completion": (-1.0, np.inf),
}


@pytest.mark.parametrize("make", objectives.OBJECTIVES.values())
def test_coefficients_outside_their_limits_are_rejected(make):
  for name in inspect.signature(make).parameters:
    for value in INVALID[name]:
      match = rf"{name} is {value!r} .*; see config\.objective\.args"
      with pytest.raises(UserError, match=match):
        make(**{name: value})


def test_a_penalty_without_a_reference_policy_is_rejected():
  x, ids = jnp.zeros((1, 2)), jnp.ones((1, 2), jnp.int32)
  with pytest.raises(ValueError, match=r"ref_logprobs is None.*beta is 0\.1"):
    policy_loss.surrogate(
      objectives.grpo(beta=0.1), x, x, x, x, jnp.ones((1, 2), bool), ids
    )
