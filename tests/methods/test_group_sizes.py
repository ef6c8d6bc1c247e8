"""Groups of several sizes: exact by enumeration, and best for their number."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dppo_jax import algo, methods
from dppo_jax.algo import objectives
from dppo_jax.algo.packing import PackingSpec
from dppo_jax.methods.neyman import pass_rates
from dppo_jax.records import Selection
from dppo_jax.rng import StepRng
from dppo_jax.step import select, update
from tests.helpers import small

PROB = np.array([0.5, 0.3, 0.2])  # of three completions of one prompt
REWARD = np.array([1.0, 0.0, 0.25])
SCORE = np.eye(3) - PROB  # gradient of the log-probability to the logits
GRADIENT = PROB * (REWARD - PROB @ REWARD)
LARGEST = 4


def _expected(advantage, includes_self, size):
  """Expected gradient of a group of `size`, over every outcome."""
  outcomes = np.array([*itertools.product(range(3), repeat=size)])
  blank = np.zeros((len(outcomes), LARGEST - size))
  is_drawn = jnp.arange(LARGEST) < jnp.full((len(outcomes), 1), size)
  rewards = jnp.array(np.concatenate([REWARD[outcomes], blank], 1))
  advantages = advantage(rewards, is_drawn) * algo.group_scale(is_drawn)
  if includes_self:
    advantages *= algo.self_correction(is_drawn)
  advantages = np.asarray(advantages)[:, :size]
  sums = np.einsum("ni,nij->nj", advantages, SCORE[outcomes])
  return PROB[outcomes].prod(axis=1) @ sums / LARGEST


@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_expected_gradient_does_not_depend_on_the_size(size):
  actual = _expected(algo.leave_one_out, False, size)
  np.testing.assert_allclose(actual, GRADIENT, atol=1e-6)
  actual = _expected(algo.group_centred, True, size)
  np.testing.assert_allclose(actual, GRADIENT * 3 / 4, atol=1e-6)


def test_advantages_over_their_deviation_depend_on_the_size():
  """The stated deviation of `grpo`: these two differ by more than a factor."""
  two, four = (_expected(algo.group_normalized, True, g) for g in (2, 4))
  ratio = two / four
  assert ratio.max() - ratio.min() > 0.01


def _gradient(objective, sizes):
  """Gradient per completion of full groups, from rows as a step packs them."""
  prompts = small.prompts(len(sizes))
  full = small.rollout(prompts, group=LARGEST)
  drawn = jnp.arange(LARGEST) < jnp.array(sizes)[:, None]
  rollout = full.replace(lengths=jnp.where(drawn, full.lengths, 0))
  rewards = jnp.array([[1.0, 0.0, 0.0, 1.0], [0.0, 1.0, 1.0, 1.0]])
  method = methods.grpo()
  batch, num_micro, *_ = select.select(
    StepRng(jax.random.key(0), jnp.int32(0)),
    prompts,
    rollout,
    jnp.where(drawn, rewards[: len(sizes)], 0.0),
    method=method,
    objective=objective,
    spec=PackingSpec(row_length=24, rows_per_micro=2, window=4),
  )
  config = update.UpdateConfig(small.MODEL, objective)
  sums = update.sum_gradients(batch, num_micro, small.params(), None, config)
  total = jax.tree.map(lambda x: x / (len(sizes) * LARGEST), sums.grad)
  return np.concatenate([np.ravel(x) for x in jax.tree.leaves(total)])


@pytest.mark.parametrize(
  ("objective", "factor"),
  [(objectives.rloo(), 1.0), (objectives.dr_grpo(), 1.5)],
)
def test_a_smaller_group_is_weighted_like_a_full_one(objective, factor):
  """Two groups of 2 and 4; the first one alone is a group of 2.

  The second is full: what the smaller one adds does not depend on it.
  """
  both, second = (_gradient(objective, sizes) for sizes in ([2, 4], [0, 4]))
  prompts = small.prompts(2)
  alone = small.rollout(prompts, group=LARGEST)
  alone = alone.replace(slot_steps=None, busy_steps=None)
  alone = jax.tree.map(lambda x: x[:1], alone)
  pair = lambda x: x[:, :2] if x.ndim > 1 else x
  alone = jax.tree.map(pair, alone)
  alone = alone.replace(kept=Selection(jnp.array([True]), jnp.ones(1)))
  batch, num_micro, *_ = select.select(
    StepRng(jax.random.key(0), jnp.int32(0)),
    jax.tree.map(lambda x: x[:1], prompts),
    alone,
    jnp.array([[1.0, 0.0]]),
    method=methods.grpo(),
    objective=objective,
    spec=PackingSpec(row_length=24, rows_per_micro=2, window=4),
  )
  config = update.UpdateConfig(small.MODEL, objective)
  sums = update.sum_gradients(batch, num_micro, small.params(), None, config)
  grads = [np.ravel(x) / 2 for x in jax.tree.leaves(sums.grad)]
  want = factor * np.concatenate(grads) / 2  # the mean over two prompts
  np.testing.assert_allclose(both - second, want, atol=1e-6)
  assert np.abs(want).max() > 1e-3


@pytest.mark.parametrize("factory", [objectives.dr_grpo, objectives.rloo])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_expected_penalty_does_not_depend_on_the_size(factory, size):
  """Over every member in turn: each group of `size` is equally likely.

  Equal rewards leave the KL penalty alone.
  """
  objective = factory(beta=0.5)
  prompts = small.prompts(1)
  full = small.rollout(prompts, group=LARGEST)
  reference = jax.tree.map(lambda x: 0.9 * x, small.params())
  config = update.UpdateConfig(small.MODEL, objective)

  def gradient(members):
    is_drawn = jnp.isin(jnp.arange(LARGEST), jnp.array(members))
    batch, num_micro, *_ = select.select(
      StepRng(jax.random.key(0), jnp.int32(0)),
      prompts,
      full.replace(lengths=jnp.where(is_drawn, full.lengths, 0)),
      jnp.ones((1, LARGEST)),
      method=methods.grpo(),
      objective=objective,
      spec=PackingSpec(row_length=24, rows_per_micro=2, window=4),
    )
    sums = update.sum_gradients(
      batch, num_micro, small.params(), reference, config
    )
    return np.concatenate([np.ravel(x) for x in jax.tree.leaves(sums.grad)])

  every = gradient(range(LARGEST))
  some = [*itertools.combinations(range(LARGEST), size)]
  mean = np.mean([gradient(members) for members in some], axis=0)
  np.testing.assert_allclose(mean, every, rtol=1e-4, atol=1e-5)
  assert np.abs(every).max() > 1e-3


def _history(right, wrong):
  """Counts of problems with completions of one length."""
  right, wrong = jnp.array(right), jnp.array(wrong)
  counts = pass_rates.init(len(right))
  return counts._replace(right=right, wrong=wrong, tokens=5 * (right + wrong))


@pytest.mark.parametrize("budget", [0.5, 0.6, 0.75, 1.0])
def test_no_other_sizes_have_less_variance(budget):
  history = _history([3.0, 4.0, 0.0, 1.0], [3.0, 0.0, 0.0, 9.0])
  rng = StepRng(jax.random.key(0), jnp.int32(0))
  rule = methods.group_sizes(budget)
  sizes = np.asarray(rule(rng, history, jnp.arange(4), LARGEST))
  right, wrong = (
    np.asarray(history.right) + 0.2,
    np.asarray(history.wrong) + 0.2,
  )
  spread = right * wrong / ((right + wrong) * (right + wrong + 1))
  variance = lambda sizes: (spread / (np.array(sizes) - 1)).sum()
  options = itertools.product(range(2, LARGEST + 1), repeat=4)
  best = min(
    variance(x) for x in options if sum(x) == max(round(budget * 16), 8)
  )
  assert sizes.sum() == round(budget * 16)
  assert variance(sizes) == pytest.approx(best, rel=1e-6)


def test_few_completions_are_sampled_where_all_were_alike():
  rng = StepRng(jax.random.key(0), jnp.int32(0))
  history = _history([8.0, 0.0, 4.0, 0.0], [0.0, 8.0, 4.0, 0.0])
  sizes = methods.group_sizes(0.5)(rng, history, jnp.arange(4), 8)
  assert sizes[2] > sizes[3] > max(sizes[0], sizes[1])
