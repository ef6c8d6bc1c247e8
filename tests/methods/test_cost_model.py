"""The cost model: probabilities, added variance and the best budget.

It predicts what a draw with `designs.water_filling` does.
"""

from hypothesis import given
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dppo_jax.algo import designs
from dppo_jax.methods.neyman import budget
from experiments.common.variance import added_variance

NUM = 12
SIZES = st.lists(
  st.one_of(st.just(0.0), st.just(1.0), st.floats(1e-3, 1e3)),
  min_size=NUM,
  max_size=NUM,
)
_filled = jax.jit(jax.vmap(designs.water_filling, (None, 0)))
_proportional = jax.jit(budget.proportional)
_added = jax.jit(added_variance)


@given(SIZES)
def test_probabilities_equal_those_of_the_draw(size):
  """Sizes with ties and zeros; budgets above the number of items."""
  size = jnp.array(size, jnp.float32)
  budgets = np.arange(1, NUM + 2, dtype=np.int32)
  want = _filled(size, budgets)
  actual = _proportional(size, jnp.array(budgets, jnp.float32))
  # The grid has no probability between 0 and its least.
  np.testing.assert_allclose(actual, want, atol=NUM / designs.GRID)
  some = np.minimum(budgets, int((size > 0).sum()))
  np.testing.assert_allclose(actual.sum(axis=1), some, rtol=1e-4)


@pytest.mark.parametrize("num", [1, 3])
def test_the_variance_added_is_that_of_independent_draws(num):
  """Enumerates all draws; variance is a fraction of the sum of squares."""
  size = jnp.array([3.0, 2.0, 1.0, 1.0])
  prob = budget.proportional(size, jnp.array([float(num)]))
  terms = np.array([3.0, -2.0, 1.0, 1.0])  # in lengths as in sizes
  keeps = np.array(list(np.ndindex(2, 2, 2, 2)))
  p = np.asarray(prob[0], np.float64)
  chance = np.where(keeps, p, 1 - p).prod(axis=1)
  total = (keeps * terms / p).sum(axis=1)
  assert chance @ total == pytest.approx(terms.sum(), rel=1e-6)
  variance = chance @ (total - terms.sum()) ** 2
  actual = added_variance(prob, size * size)[0]
  np.testing.assert_allclose(actual, variance / (terms**2).sum(), rtol=1e-5)


def test_the_variance_added_in_closed_form():
  """Equal terms give 1 / prob - 1, and a needed term of prob 0 infinity."""
  alike = jnp.ones(8)
  budgets = jnp.array([1.0, 2.0, 4.0, 8.0])
  added = _added(_proportional(alike, budgets), alike)
  np.testing.assert_allclose(added, [7.0, 3.0, 1.0, 0.0], atol=1e-5)
  prob = jnp.array([[1.0, 0.0], [1.0, 0.5], [0.0, 1.0]])
  squares = jnp.array([1.0, 1.0])
  np.testing.assert_allclose(_added(prob, squares), [np.inf, 0.5, np.inf])
  assert _added(prob, jnp.array([1.0, 0.0]))[0] == 0  # nothing is lost
  assert (_added(prob, jnp.zeros(2)) == 0).all()


@pytest.mark.parametrize("shared", [0.0, 0.5, 1.0])
def test_the_variance_added_by_systematic_draws(monkeypatch, shared):
  """Enumerates all draws, of gradients with the shared part that is assumed."""
  monkeypatch.setattr(budget, "SHARED", shared)
  size = np.array([2.0, 1, 1, 3, 2, 4, 1, 2])
  prob = np.array([0.5, 0.25, 0.25, 0.75, 0.5, 1, 0.25, 0.5])
  sign = np.array([1, 1, 1, -1, 1, -1, -1, -1])
  stratum = np.array([0, 0, 0, 1, 2, 3, 3, 3])
  parts = [
    np.sqrt(shared) * np.eye(4)[stratum],
    np.sqrt(1 - shared) * np.eye(8),
  ]
  terms = size[:, None] * np.concatenate(parts, axis=1)
  offsets = np.arange(16, dtype=np.uint32) * np.uint32(designs.GRID // 16)
  keep = jax.vmap(designs.systematic_at, (0, None))(offsets, jnp.array(prob))
  errors = (np.asarray(keep) / prob - 1) @ terms
  want = (errors**2).sum() / len(offsets) / (size**2).sum()
  actual = budget.systematic_variance(
    jnp.array(prob[None]), jnp.array(size**2), jnp.array(sign > 0), (2, 4)
  )
  np.testing.assert_allclose(actual, [want], rtol=1e-5)


def test_single_completions_of_a_kind_vary_as_in_independent_draws():
  """Groups of two."""
  size, sign = jnp.array([3.0, 1.0, 1.0, 2.0]), np.array([1, -1, -1, 1])
  prob = budget.proportional(size, jnp.array([1.0, 2.0]))
  some = budget.systematic_variance(prob, size**2, jnp.array(sign > 0), (2, 2))
  np.testing.assert_allclose(some, added_variance(prob, size**2))


@given(SIZES, st.floats(0.0, 1.0))
def test_proportional_probabilities_add_the_least(size, mix):
  """Other probabilities with the same sum add no less."""
  size = jnp.array(size, jnp.float32)
  is_some = (size > 0).astype(jnp.float32)
  budget = jnp.minimum(jnp.float32(3), is_some.sum())
  prob = _proportional(size, budget[None])
  even = (is_some * budget / jnp.maximum(is_some.sum(), 1.0))[None]
  other = mix * even + (1 - mix) * prob
  squares = size * size
  assert _added(prob, squares)[0] <= _added(other, squares)[0] * 1.0001 + 1e-4


@pytest.mark.parametrize(
  ("times", "best"),
  [
    ([0.5, 0.7, 1.0], 0),
    ([0.9, 0.7, 1.0], 1),
    ([0.5, 0.51, 1.0], 1),  # hardly slower, and adds less noise
    ([0.51, 0.5, 1.0], 1),
    ([0.985, 0.99, 1.0], 2),
    ([0.5, 0.7, 0.4], 2),
    ([np.inf, np.nan, 1.0], 2),
    ([np.nan, np.nan, np.nan], 2),
    ([np.nan, 0.5, 1.0], 1),
    ([0.0, 0.0, 0.0], 2),  # nothing is known
  ],
)
def test_largest_near_optimal_budget_is_chosen(times, best):
  assert budget.largest_near_optimal(np.array(times)) == best
