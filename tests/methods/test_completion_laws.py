"""One table of all completion rules and the laws that every one obeys."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dppo_jax import methods
from dppo_jax.algo import advantages, designs, horvitz_thompson, invalid_probs
from dppo_jax.methods import METHODS
from dppo_jax.records import Groups, Selection
from dppo_jax.rng import StepRng
from tests.helpers.prompts import EVERY

_relaxing = lambda step: jnp.minimum(0.4 + step.astype(jnp.float32), 1.0)
_small = methods.drop_small_advantage
_top = methods.top_abs_advantage
_variance = methods.max_variance

# Rules that keep as often as they say, and those that say otherwise.
HONEST = {
  "every_completion": methods.every_completion(),
  "drop_small_advantage": _small(0.6),
  "drop_small_advantage batch": _small(0.6, "batch"),
  "top_abs_advantage": _top(0.5),
  "top_abs_advantage batch": _top(0.4, "batch"),
  "max_variance": _variance(0.5),
  "max_variance batch": _variance(_relaxing, "batch"),
  "neyman": methods.neyman_completions(0.4),
}
BIASED = {"unweighted": methods.unweighted(_small(0.6))}
HONEST_METHODS = ("grpo", "dppo", "greso", "neyman")
BIASED_METHODS = ("cppo", "pods", "d1s", "d2s", "d3s")
HONEST |= {name: EVERY[name].completions for name in HONEST_METHODS}
BIASED |= {name: EVERY[name].completions for name in BIASED_METHODS}
# Here the probability is a function of the draw too.
VARYING = ("unweighted",)
RULES = HONEST | BIASED

REWARDS = np.array(
  [
    [1, 0, 0, 0, 0, 0],
    [1, 1, 1, 0, 0, 0],
    [0, 0, 0, 0, 0, 0],
    [1, 1, 1, 1, 1, 0],
    [1, 0, 1, 0, 0, 0],
  ],
  np.float32,
)
LENGTHS = np.arange(30, dtype=np.int32).reshape(5, 6) % 7 + 1
LENGTHS[4] = 0  # its prompt was not rolled out
ORDER = np.array([3, 1, 5, 0, 4, 2])


@functools.cache
def _draws(name):
  """2000 choices of a rule among permuted groups, and how often it compiled."""
  every = jax.random.split(jax.random.key(0), 2000)
  traces = []

  @jax.jit
  def draw(groups):
    traces.append(1)
    at = lambda key: RULES[name](StepRng(key, jnp.int32(0)), groups)
    return jax.vmap(at)(every)

  def choose(order=slice(None)):
    rewards = jnp.array(REWARDS[:, order])
    chosen = draw(
      Groups(
        rewards,
        advantages.group_normalized(rewards),
        jnp.array(LENGTHS[:, order]),
      )
    )
    return np.asarray(chosen.keep), np.asarray(chosen.prob)

  return choose, traces


def test_every_method_is_in_the_table():
  """A new one says above whether its probabilities are those of its draw."""
  assert {*HONEST_METHODS, *BIASED_METHODS} == set(METHODS)


@pytest.mark.parametrize("name", RULES)
def test_completion_rule_laws(name):
  choose, traces = _draws(name)
  keep, prob = choose()
  assert keep.shape == prob.shape == (2000, *REWARDS.shape)
  assert keep.dtype == bool and prob.dtype == np.float32
  assert np.isfinite(prob).all() and (prob >= 0).all()
  kept = jnp.array(keep & (LENGTHS > 0))
  assert invalid_probs(Selection(kept, jnp.array(prob))) == 0
  again, _ = choose()
  np.testing.assert_array_equal(keep, again)  # same draw, same choice
  _, permuted = choose(ORDER)
  if name not in VARYING:
    np.testing.assert_allclose(
      permuted, prob[:, :, ORDER], atol=2 / designs.GRID
    )
  assert len(traces) == 1


@pytest.mark.parametrize("name", HONEST)
def test_completions_are_kept_with_reported_probabilities(name):
  """Tolerance: 5 standard errors of 30 shares; false alarm below 2e-5."""
  keep, prob = _draws(name)[0]()
  prob = prob[0]
  assert (prob <= 1).all()
  error = 5 * np.sqrt(prob * (1 - prob) / len(keep))
  assert (np.abs(keep.mean(axis=0) - prob) <= error + 1e-7).all()


def test_small_advantages_are_below_their_groups_mean():
  prob = _draws("drop_small_advantage")[0]()[1][0]
  np.testing.assert_allclose(prob[0], [1, 0.4, 0.4, 0.4, 0.4, 0.4], rtol=1e-6)
  # Half right: every |advantage| is the mean, up to rounding; so none is small.
  np.testing.assert_array_equal(prob[1], 1)
  np.testing.assert_array_equal(prob[2], 1)


SPOILED = {
  **EVERY,
  "dppo batch": methods.dppo(0.5, 0.9, "batch"),
  "cppo batch": methods.cppo(0.1, "batch"),
  "d1s batch": methods.d1s(0.1, "batch"),
  "neyman few": methods.neyman(0.5, 0.1, 0.1),
  "neyman least": methods.neyman(0.5, 0.1, min_prob=1.0),
}


@pytest.mark.parametrize("name", SPOILED)
@pytest.mark.parametrize("reward", [np.nan, np.inf, -np.inf])
def test_nan_reward_reaches_the_gradient(name, reward):
  """The update is then non-finite, so it is skipped and counted."""
  method = SPOILED[name]
  rewards = jnp.array(REWARDS).at[1, 2].set(reward)
  lengths = jnp.array(LENGTHS)

  @jax.jit
  def draw(key):
    a = advantages.group_normalized(rewards)
    is_needed = (a != 0) & (lengths > 0)
    groups = Groups(rewards, a, lengths, is_needed)
    chosen = method.completions(StepRng(key, jnp.int32(0)), groups)
    if method.has_statistics_after:
      counted = chosen.keep & (lengths > 0)
      a = advantages.group_normalized(rewards, counted)
    everyone = Selection(jnp.ones(5, bool), jnp.ones(5))
    weights = jnp.where(lengths > 0, horvitz_thompson(everyone, chosen), 0.0)
    return jnp.where(weights != 0, weights * a, 0.0).sum()

  keys = jax.random.split(jax.random.key(0), 200)
  assert not np.isfinite(jax.lax.map(draw, keys)).any()
