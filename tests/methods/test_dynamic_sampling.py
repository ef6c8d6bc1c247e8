"""Dynamic sampling against brute force, and its mean by exact enumeration."""

from fractions import Fraction
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dppo_jax import methods
from dppo_jax.methods.dynamic_sampling import (
  DynamicSampling,
  add_groups,
  denominator,
  draws_of_step,
  init_buffer,
  next_size,
)
from dppo_jax.records import PromptBatch, Rollout, Selection
from dppo_jax.rng import rng_at
from dppo_jax.step import collect
from tests.helpers import small

# What may happen to a candidate: its chance, whether it was kept and with what
# probability, whether its group has variance, and its term of the gradient.
# Half of the candidates are always kept, the others once in four times.
OUTCOMES = [
  # chance, keep, prob, has variance, value
  (0.2, True, 1.0, True, 3),
  (0.3, True, 1.0, False, 0),
  (0.375, False, 0.25, True, 7),  # skipped: its rewards stay unknown
  (0.0875, True, 0.25, True, 5),
  (0.0375, True, 0.25, False, 0),
]
CHANCE, KEEP, PROB, IS_MIXED, VALUE = (
  np.array(column) for column in zip(*OUTCOMES, strict=True)
)
TERM = np.where(KEEP & IS_MIXED, VALUE / PROB, 0.0)
MEAN = CHANCE @ TERM


def _chunk(outcome, ids):
  """One chunk `[N]` of the numbered outcomes; groups of 2, 1 token each."""
  keep, is_mixed = jnp.array(KEEP)[outcome], jnp.array(IS_MIXED)[outcome]
  prob = jnp.array(PROB, jnp.float32)[outcome]
  rolled = keep[:, None] & jnp.ones((1, 2), bool)
  first = jnp.where(is_mixed, 0.0, 1.0)  # of a skipped one, never to be used
  rewards = jnp.stack([first, jnp.ones_like(first)], axis=1)
  value = jnp.array(VALUE, jnp.int32)[outcome]
  return (
    PromptBatch(ids, ids[:, None], jnp.ones_like(ids)),
    Rollout(
      prompt_ids=ids,
      tokens=jnp.broadcast_to(value[:, None, None], (len(ids), 2, 1)),
      logprobs=jnp.zeros((len(ids), 2, 1)),
      lengths=rolled.astype(jnp.int32),
      is_stopped=rolled,
      kept=Selection(keep, prob),
      slot_steps=rolled.sum(dtype=jnp.float32),
    ),
    rewards,
  )


def _step(outcomes):
  """All chunks `[D, N]` of outcomes, collected; ids count the candidates."""
  ids = jnp.arange(outcomes.size, dtype=jnp.int32).reshape(outcomes.shape)
  like = _chunk(outcomes[0], ids[0])
  return jax.lax.scan(
    lambda buffer, chunk: (add_groups(buffer, *_chunk(*chunk)), None),
    init_buffer(*like),
    (outcomes, ids),
  )[0]


@jax.jit
@jax.vmap
def _collect(outcomes):
  """Returns the buffer, and its plain and exact denominators."""
  buffer = _step(outcomes)
  rules = (
    DynamicSampling(len(outcomes), False),
    DynamicSampling(len(outcomes), True),
  )
  return buffer, *(denominator(buffer, rule) for rule in rules)


def _estimates(sequences, is_exact):
  """Sums over what was collected, `[K]`, each over its denominator."""
  buffer, *below = jax.device_get(_collect(sequences))
  kept = buffer.rollout.kept
  value = buffer.rollout.tokens[:, :, 0, 0]
  total = np.where(kept.keep, value / kept.prob, 0.0).sum(axis=1)
  return total / below[is_exact]


def _sequences(num_draws, size):
  """All sequences of outcomes, and how likely each is."""
  every = itertools.product(range(len(OUTCOMES)), repeat=num_draws * size)
  every = np.array(list(every), np.int32)
  return every.reshape(-1, num_draws, size), CHANCE[every].prod(axis=1)


@pytest.mark.parametrize("num_draws, size", [(1, 2), (1, 3), (2, 2), (2, 3)])
def test_exact_mean_is_that_of_all_candidates(num_draws, size):
  """Covers steps that often end before the buffer is full."""
  sequences, chance = _sequences(num_draws, size)
  exact = chance @ _estimates(sequences, True)
  np.testing.assert_allclose(exact, MEAN, rtol=1e-5)
  plain = chance @ _estimates(sequences, False)
  assert abs(plain - MEAN) > 0.5 * MEAN


def test_exact_mean_is_that_of_a_finite_population_in_random_order():
  population = np.array([0, 3, 1, 1, 2, 0], np.int32)
  orders = np.array(list(itertools.permutations(population)), np.int32)
  exact = _estimates(orders.reshape(-1, 3, 2), True).mean()
  np.testing.assert_allclose(exact, TERM[population].mean(), rtol=1e-5)


def _orders(population):
  """Every order of the problems, in draws of two, as an epoch has them."""
  orders = np.array(list(itertools.permutations(population)), np.int32)
  return orders.reshape(len(orders), -1, 2)


def _mean_of_second_step(orders, stop):
  """Collects steps that each begin at the draw after the previous step's last.

  Args:
    orders: `[K, 4, 2]`, outcomes of two epochs of two draws each.
    stop: the draw at which a step must end that begins at some draw.
  """
  first = jax.device_get(_collect(orders[:, :1]))[0]
  begins = np.where(first.num_groups == 2, 1, 2)
  total = 0.0
  for begin in (1, 2):
    drawn = orders[begins == begin, begin : stop(begin)]
    total += _estimates(drawn, True).sum()
  return total / len(orders)


def test_steps_that_begin_where_the_last_one_ended_are_biased():
  """Two of four problems have variance: -9% across the border of an epoch.

  Ending at the border is worse, -17%: the rest of the epoch, which the second
  step draws from, depends on the groups that the first step found.
  """
  epochs = _orders([0, 3, 1, 1])
  pairs = itertools.product(epochs, repeat=2)
  orders = np.array([np.concatenate(pair) for pair in pairs])
  mean = TERM[[0, 3, 1, 1]].mean()
  across = _mean_of_second_step(orders, stop=lambda begin: begin + 2)
  assert abs(across / mean - 1) > 0.02
  within = _mean_of_second_step(orders, stop=lambda begin: 2 * begin)
  assert abs(within / mean - 1) > 0.1


@pytest.mark.parametrize("step", [0, 1])
def test_exact_steps_have_the_mean_of_an_epoch_each(step):
  """An epoch of four draws holds two steps of at most two draws."""
  population = [0, 3, 1, 1, 0, 2, 4, 1]
  draws = draws_of_step(DynamicSampling(2, True), step, 0, 4)
  drawn = np.unique(_orders(population)[:, draws], axis=0, return_counts=True)
  exact = np.average(_estimates(drawn[0], True), weights=drawn[1])
  np.testing.assert_allclose(exact, TERM[population].mean(), rtol=1e-5)


def test_draws_of_a_step():
  plain, exact = DynamicSampling(3, False), DynamicSampling(3, True)
  for first in (0, 5, 8):
    assert draws_of_step(plain, 99, first, 8) == range(first, first + 3)
  # Two draws of each epoch of eight are left out; what was drawn is no matter.
  blocks = [draws_of_step(exact, step, 99, 8) for step in range(5)]
  assert [x.start for x in blocks] == [0, 3, 8, 11, 16]
  assert {len(x) for x in blocks} == {3}
  # An epoch of fewer draws than a step may make is one step.
  blocks = [draws_of_step(exact, step, 99, 2) for step in range(3)]
  assert blocks == [range(0, 2), range(2, 4), range(4, 6)]


def test_one_draw_divides_by_its_candidates():
  sequences, _ = _sequences(1, 3)
  expected = TERM[sequences[:, 0]].mean(axis=1)
  estimates = _estimates(sequences, True)
  np.testing.assert_allclose(estimates, expected, rtol=1e-6)


def test_the_buffer_holds_the_first_groups_with_variance_in_order():
  sequences, _ = _sequences(2, 2)
  buffer, plain, _ = jax.device_get(_collect(sequences))
  flat = sequences.reshape(len(sequences), -1)
  for k, outcome in enumerate(flat):
    places = np.flatnonzero((KEEP & IS_MIXED)[outcome])
    used = places[:2]
    num = len(used)
    assert buffer.num_groups[k] == num
    assert buffer.num_seen[k] == (places[1] + 1 if num == 2 else 4)
    np.testing.assert_array_equal(buffer.prompts.ids[k, :num], used)
    np.testing.assert_array_equal(buffer.prompts.tokens[k, :num, 0], used)
    np.testing.assert_array_equal(buffer.rollout.prompt_ids[k, :num], used)
    np.testing.assert_array_equal(
      buffer.rewards[k, :num], np.tile([0, 1], (num, 1))
    )
    np.testing.assert_array_equal(
      buffer.rollout.kept.prob[k, :num], PROB[outcome[used]]
    )
    assert buffer.rollout.slot_steps[k] == 2 * KEEP[outcome].sum()
  is_used = np.arange(2) < buffer.num_groups[:, None]
  kept = buffer.rollout.kept
  np.testing.assert_array_equal(kept.keep, is_used)
  assert (kept.prob[~is_used] == 1).all()
  assert (buffer.rollout.lengths[~is_used] == 0).all()
  assert (buffer.rewards[~is_used] == 0).all()
  assert not buffer.rollout.is_stopped[~is_used].any()
  np.testing.assert_array_equal(plain, np.maximum(buffer.num_groups, 1))
  # No two places name the same prompt, blank or not.
  assert (buffer.prompts.ids[:, 0] != buffer.prompts.ids[:, 1]).all()


def test_next_chunk_is_a_quarter_larger_than_estimated():
  sequences, _ = _sequences(1, 4)

  @jax.jit
  @jax.vmap
  def sizes(outcome, number):
    chunk = _chunk(outcome, jnp.arange(4, dtype=jnp.int32))
    buffer = init_buffer(*chunk)._replace(num_groups=number)
    return [
      next_size(buffer, *chunk[1:], DynamicSampling(2, is_exact))
      for is_exact in (False, True)
    ]

  number = np.arange(len(sequences), dtype=np.int32) % 5
  plain, exact = jax.device_get(sizes(sequences[:, 0], number))
  assert (exact == 4).all()
  for outcome, done, size in zip(sequences[:, 0], number, plain, strict=True):
    rolled = int(KEEP[outcome].sum())
    mixed = int((KEEP & IS_MIXED)[outcome].sum())
    expected = 4
    if mixed:
      share = Fraction(mixed, rolled)
      expected = min(4, math.ceil(Fraction(5, 4) * (4 - int(done)) / share))
    assert size == expected


def test_limit_keeps_the_first():
  keep = np.array(list(itertools.product([False, True], repeat=5)))
  prob = jnp.full((5,), 0.5, jnp.float32)
  ids = jnp.arange(5, dtype=jnp.int32)

  # Here the history is what the rule keeps.
  select = lambda rng, history, ids: Selection(history, prob)
  rule = methods.every_prompt()._replace(select=select)
  method = methods.grpo()._replace(prompts=rule)

  @jax.jit
  def limited(size):
    choose = lambda x: collect.choose_prompts(
      rng_at(jax.random.key(0), 0), x, ids, size, spec=small.spec(method=method)
    )
    return jax.vmap(choose)(keep)

  for size in range(6):
    buffer = jax.device_get(limited(size))
    for before, after in zip(keep, buffer.keep, strict=True):
      first = np.flatnonzero(before)[:size]
      np.testing.assert_array_equal(np.flatnonzero(after), first)
    assert (buffer.prob == 0.5).all()
  assert limited._cache_size() == 1
