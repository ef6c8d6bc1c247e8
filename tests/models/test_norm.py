"""The norm: its slopes are those of the plain formula."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dppo_jax.models import norm

EPS = 1e-2  # large enough to be seen in the slopes


def _plain(x, scale):
  return x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + EPS) * scale


@pytest.mark.parametrize("dtype, error", [("float32", 1e-5), ("bfloat16", 0.1)])
@pytest.mark.parametrize("shape", [(16,), (3, 16), (2, 5, 16), (2, 5, 3, 16)])
def test_values_and_slopes_are_those_of_the_formula(shape, dtype, error):
  key = jax.random.key(len(shape))
  make = lambda i, s: jax.random.normal(jax.random.fold_in(key, i), s, dtype)
  x, scale, slope = make(0, shape), make(1, shape[-1:]), make(2, shape)
  out, pull = jax.vjp(lambda x, s: norm.rms_norm(x, s, EPS), x, scale)
  got = out, *pull(slope)
  assert [a.dtype for a in got] == [dtype] * 3
  x, scale, slope = (a.astype("float32") for a in (x, scale, slope))
  out, pull = jax.vjp(_plain, x, scale)
  for a, b in zip(got, (out, *pull(slope)), strict=True):
    np.testing.assert_allclose(a.astype("float32"), b, rtol=error, atol=error)
