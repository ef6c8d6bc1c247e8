"""Probabilities are optimal and on the grid; draws honour them exactly."""

import functools

from hypothesis import given
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dppo_jax.algo import designs

GRID = designs.GRID
M = 10  # one length, so that each function compiles once

water_filling = jax.jit(designs.water_filling, static_argnums=2)
systematic = jax.jit(designs.systematic)


@jax.jit
def _marks_kept(start, prob):
  """Counts how often 2^16 offsets keep each item, and the extremes of n."""
  offsets = start + jnp.arange(2**16, dtype=jnp.uint32)
  keep = jax.vmap(designs.systematic_at, (0, None))(offsets, prob)
  size = keep.sum(axis=1, dtype=jnp.int32)
  return keep.sum(axis=0, dtype=jnp.int32), size.min(), size.max()


def _units(prob):
  """Converts to units of 1 / GRID; fails if they are not integers."""
  units = np.asarray(prob, np.float64) * GRID
  np.testing.assert_array_equal(units, np.round(units))
  return units.astype(np.int64)


def _optimum(size, n, least):
  """The same allocation by bisection of the logarithm, in float64."""
  size = np.asarray(size, np.float64)
  positive = size > 0
  if positive.sum() <= n:
    return positive.astype(np.float64)
  least = min(max(least, 1 / GRID), n / positive.sum())
  prob = lambda log: np.where(
    positive, np.clip(np.exp(log) * size, least, 1), 0
  )
  low, high = -200.0, 200.0
  for _ in range(200):
    middle = (low + high) / 2
    low, high = (middle, high) if prob(middle).sum() < n else (low, middle)
  return prob(low)


def _padded(values):
  return np.array([*values, *[0] * (M - len(values))], np.float32)


SIZES = st.lists(
  st.one_of(
    st.just(0.0),
    st.floats(-6, 3).map(lambda exponent: 10**exponent),
    st.sampled_from([1e-6, 1.0, 1e3]),  # ties
  ),
  max_size=M,
).map(_padded)
LEAST = st.sampled_from([0.0, 0.05, 0.3, 1.0])


@given(SIZES, st.integers(0, M), LEAST)
def test_water_filling_is_the_optimum_on_the_grid(size, n, least):
  prob = np.asarray(water_filling(jnp.array(size), n, least))
  units, positive = _units(prob), size > 0
  assert units.sum() == min(n, positive.sum()) * GRID
  if n == 0:
    return
  np.testing.assert_array_equal(prob > 0, positive)
  assert prob.max() <= 1
  if least * positive.sum() < n:
    assert (prob[positive] >= min(least, 1)).all()
  np.testing.assert_allclose(prob, _optimum(size, n, least), atol=M / GRID)
  if positive.sum() <= n:
    np.testing.assert_array_equal(prob, positive)


@given(st.lists(st.floats(0.01, 0.9), min_size=2, max_size=M), st.data())
def test_water_filling_is_within_a_unit_of_the_optimum(weights, data):
  n = data.draw(st.integers(1, len(weights)))
  size = _padded(weights)
  units = _units(water_filling(jnp.array(size), n, 0.0))
  exact = _optimum(size, n, 0.0) * GRID
  assert np.abs(units - exact).max() < 1.2  # float32 holds an eighth of a unit


@pytest.mark.parametrize("least", [0.9, 1 - 1e-6, 1 - 1e-7, 1.0])
def test_no_least_probability_keeps_more_than_the_budget(least):
  prob = water_filling(jnp.array(_padded([1, 2, 3, 4])), 2, least)
  np.testing.assert_array_equal(prob, _padded([0.5] * 4))
  prob = water_filling(jnp.array(_padded([1, 2])), 2, least)
  np.testing.assert_array_equal(prob, _padded([1, 1]))


@given(SIZES, st.integers(1, M), LEAST)
def test_no_exchange_of_probability_lowers_the_variance(size, n, least):
  prob = np.asarray(water_filling(jnp.array(size), n, least), np.float64)
  size = size.astype(np.float64)
  variance = lambda prob: (size[size > 0] ** 2 / prob[size > 0]).sum()
  for giver in np.flatnonzero(size > 0):
    for taker in np.flatnonzero(size > 0):
      for step in (1e-3, 1e-2, 0.1):
        other = prob.copy()
        other[giver] -= step
        other[taker] += step
        if other[giver] >= max(least, 1e-3) and other[taker] <= 1:
          assert variance(prob) <= variance(other) * (1 + 1e-9)


@pytest.mark.parametrize("unit", [1e-30, 2.0**-126, 1e37])
def test_water_filling_does_not_depend_on_the_unit(unit):
  sizes = jnp.array(_padded([8, 4, 4, 1]))
  expected = water_filling(sizes, 2, 0.0)
  np.testing.assert_allclose(water_filling(unit * sizes, 2, 0.0), expected)


def test_water_filling_in_closed_form():
  # 8 is certain; the other two places go as 4 : 2 : 2, at a quarter each.
  prob = water_filling(jnp.array(_padded([4, 8, 2, 2, 0])), 3, 0.0)
  np.testing.assert_array_equal(prob, _padded([1, 1, 0.5, 0.5, 0]))
  # A floor of 0.3 takes from what is above it.
  prob = water_filling(jnp.array(_padded([6, 3, 1])), 1, 0.25)
  np.testing.assert_allclose(prob, _padded([0.5, 0.25, 0.25]), atol=3 / GRID)
  # No floor can be above the even share.
  prob = water_filling(jnp.array(_padded([9, 3, 1, 0, 1])), 1, 0.3)
  np.testing.assert_array_equal(prob, _padded([0.25, 0.25, 0.25, 0, 0.25]))


@given(SIZES, st.integers(0, M), LEAST, st.sampled_from([-60, 60]))
def test_size_may_be_in_any_unit(size, n, least, power):
  np.testing.assert_array_equal(
    water_filling(jnp.array(size * np.float32(2.0) ** power), n, least),
    water_filling(jnp.array(size), n, least),
  )


@given(SIZES, st.integers(1, M), LEAST, st.permutations(range(M)))
def test_water_filling_does_not_depend_on_the_order(size, n, least, order):
  order = np.array(order)
  prob = _units(water_filling(jnp.array(size), n, least))
  permuted = _units(water_filling(jnp.array(size[order]), n, least))
  # Among equal items, the first get the last units.
  assert np.abs(permuted - prob[order]).max() <= 1


@pytest.mark.parametrize(
  "size, n",
  [
    ([1, 2, 3, 4, 5, 6, 7], 3),
    ([1e-6, 1e3, 0, 1, 1, 1e-3, 0.7], 2),
    ([1] * 10, 9),
    ([0, 3, 0, 1, 1], 1),
    ([5, 1, 0, 2], 7),
  ],
)
def test_systematic_keeps_exactly_n_with_the_given_probabilities(size, n):
  prob = water_filling(jnp.array(_padded(size)), n, 0.0)
  kept = 0
  for start in range(0, GRID, 2**16):
    count, fewest, most = _marks_kept(jnp.uint32(start), prob)
    assert fewest == most == min(n, np.count_nonzero(size))
    kept = kept + np.asarray(count, np.int64)
  np.testing.assert_array_equal(kept, _units(prob))


def test_keyed_draws_have_uniform_offsets():
  """Tolerance: 5 standard errors of 10 shares; false alarm below 1e-5."""
  prob = water_filling(jnp.array(_padded([1, 2, 3, 4, 5, 6, 7])), 3, 0.0)
  num = 20_000
  root = jax.random.split(jax.random.key(0), num)
  keep = np.asarray(jax.vmap(functools.partial(systematic, prob=prob))(root))
  assert (keep.sum(axis=1) == 3).all()
  error = 5 * np.sqrt(prob * (1 - prob) / num)
  assert (np.abs(keep.mean(axis=0) - prob) <= error).all()


def test_many_items_pass_the_range_of_32_bits_exactly():
  rng = np.random.default_rng(0)
  size = np.exp(4 * rng.normal(size=16_384)).astype(np.float32)
  prob = water_filling(jnp.array(size), 8192, 0.0)
  units = _units(prob)
  assert units.sum() == 8192 * GRID and (units > 0).all()
  optimum = _optimum(size, 8192, 0.0)
  np.testing.assert_allclose(prob, optimum, rtol=1e-4, atol=2 / GRID)
  even = _units(water_filling(jnp.array(size), 100, 0.05))
  assert even.sum() == 100 * GRID and even.max() - even.min() <= 1
  ends = units.cumsum()  # in 64 bits
  draw = jax.jit(designs.systematic_at)
  for offset in (0, 1, 123_456, GRID - 1):
    before = -(-(np.append(0, ends) - offset) // GRID)  # marks before each end
    np.testing.assert_array_equal(
      draw(jnp.uint32(offset), prob), np.diff(before) == 1
    )


def test_a_changing_number_compiles_once():
  traces = []
  fill = jax.jit(
    lambda size, n: traces.append(1) or designs.water_filling(size, n, 0.1)
  )
  size = jnp.arange(M, dtype=jnp.float32)
  sums = [_units(fill(size, jnp.int32(n))).sum() for n in (1, 4, 8, 30)]
  assert sums == [GRID, 4 * GRID, 8 * GRID, 9 * GRID] and len(traces) == 1


def test_bernoulli_draws_are_independent():
  """Tolerance: 5 standard errors of 4 numbers; false alarm below 3e-6."""
  prob, num = jnp.array([[0.0, 1.0], [0.25, 0.7]]), 20_000
  draw = jax.jit(jax.vmap(designs.bernoulli, (0, None)))
  keep = np.asarray(draw(jax.random.split(jax.random.key(0), num), prob))
  error = 5 * np.sqrt(prob * (1 - prob) / num)
  assert (np.abs(keep.mean(axis=0) - prob) <= error).all()
  both = keep[:, 1].all(axis=1).mean()
  assert abs(both - 0.175) <= 5 * np.sqrt(0.175 * 0.825 / num)


@pytest.mark.parametrize(
  "prob", [0.0, 1e-6, 2.0**-23, 0.3, 0.5, 0.7, 1 - 2.0**-24, 1.0]
)
def test_the_drawn_probability_is_exact(prob):
  """Enumerates the equally likely values of `uniform`."""
  values = np.arange(2**23, dtype=np.float32) / np.float32(2**23)
  exact = np.mean(values < np.float32(prob), dtype=np.float64)
  assert designs.drawn_probability(jnp.float32(prob)) == exact


def test_uniform_numbers_are_multiples_of_2_to_the_minus_23():
  multiples = 2.0**23 * jax.random.uniform(jax.random.key(0), (10_000,))
  np.testing.assert_array_equal(multiples, np.round(multiples))
  assert len(np.unique(multiples % 2)) == 2


def test_probabilities_of_many_items_do_not_overflow():
  """Tokens of 16,384 completions of 2,048."""
  units = np.full(2**25 + 5, 3 * GRID // 4 - 1, np.int32)
  units[-5:] = GRID, 1, 2, 3, 0
  total, remainder = divmod(int(units.sum(dtype=np.int64)), GRID)
  excess = lambda n: designs._excess(jnp.array(units), jnp.int32(n))
  assert excess(total) == remainder
  assert excess(total + 1) == remainder - GRID
  assert excess(0) > 2**29
  assert excess(len(units)) < -(2**29)
