"""Grouped products of each platform, against a loop over groups."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dppo_jax.models import grouped

# Rows of each group: even, some empty, all in one, rows left over, none at all.
SIZES = {
  "even": [64, 64, 64, 64],
  "empty": [0, 200, 0, 56],
  "one": [0, 0, 256, 0],
  "left over": [3, 70, 1, 9],
  "none": [0, 0, 0, 0],
}
CASES = pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)


def _data(num_rows=256, inner=5, outer=7):
  rng = np.random.default_rng(0)
  shapes = (num_rows, inner), (4, inner, outer), (num_rows, outer)
  return [jnp.asarray(rng.normal(size=s), jnp.float32) for s in shapes]


def _expected(rows, weights, grad, sizes):
  """Product, gradient of the rows, gradient of the weights."""
  rows, weights, grad = map(np.asarray, (rows, weights, grad))
  ends = np.cumsum(sizes)
  places = [slice(e - n, e) for e, n in zip(ends, sizes, strict=True)]
  pairs = list(zip(places, weights, strict=True))
  return (
    np.concatenate([rows[p] @ w for p, w in pairs]),
    np.concatenate([grad[p] @ w.T for p, w in pairs]),
    np.stack([rows[p].T @ grad[p] for p, _ in pairs]),
  )


@CASES
def test_a_product_and_its_gradients_are_those_of_a_loop(sizes):
  rows, weights, grad = _data()

  @jax.jit
  def run(rows, weights, grad, sizes):
    call = lambda rows, weights: grouped.product(rows, weights, sizes)
    out, pull = jax.vjp(call, rows, weights)
    return out, *pull(grad)

  out, drows, dweights = run(rows, weights, grad, jnp.array(sizes))
  want = _expected(rows, weights, grad, sizes)
  num = sum(sizes)
  np.testing.assert_allclose(out[:num], want[0], atol=1e-4)
  np.testing.assert_allclose(drows[:num], want[1], atol=1e-4)
  np.testing.assert_allclose(dweights, want[2], atol=1e-4)


@CASES
@pytest.mark.parametrize("way", [grouped._outer, grouped._outer_by_kernel])
def test_other_platforms_have_the_same_gradient_of_the_weights(way, sizes):
  """The TPU's kernel is emulated; its unused rows hold NaN."""
  inner, outer = 128, 256
  rows, weights, grad = _data(inner=inner, outer=outer)
  options = {}
  if way is grouped._outer_by_kernel:
    options["interpret"] = True
  actual = way(rows, grad, jnp.array(sizes), **options)
  want = _expected(rows, weights, grad, sizes)[2]
  np.testing.assert_allclose(actual, want, atol=1e-3)


@CASES
def test_the_library_for_gpus_computes_the_same(sizes):
  """In plain XLA, as on all devices for which it has no kernels."""
  pytest.importorskip("tokamax")
  rows, weights, grad = _data()
  want, groups = _expected(rows, weights, grad, sizes), jnp.array(sizes)
  num = sum(sizes)
  out = grouped._by_library(rows, weights, groups)
  drows = grouped._by_library(grad, weights.swapaxes(1, 2), groups)
  dweights = grouped._outer_by_library(rows, grad, groups)
  np.testing.assert_allclose(out[:num], want[0], atol=1e-4)
  np.testing.assert_allclose(drows[:num], want[1], atol=1e-4)
  np.testing.assert_allclose(dweights, want[2], atol=1e-4)


def test_a_cpu_does_no_more_work_than_there_are_blocks():
  """Uses 4 groups, for which a dense product would be 4 times the ideal."""
  _, num_blocks, _ = grouped._blocks(256, jnp.array([100, 90, 60, 6]))
  assert num_blocks == 2 + 2 + 1 + 1
