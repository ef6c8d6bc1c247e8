"""The norm's hand-written gradients; the projection; rotary positions."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dppo_jax.models import layers

EPS = 1e-2  # large enough to show in the gradients


def _plain(x, scale):
  return x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + EPS) * scale


@functools.partial(jax.jit, static_argnums=0)
def _with_grads(run, x, scale, grad):
  out, pull = jax.vjp(run, x, scale)
  return out, *pull(grad)


@pytest.mark.parametrize("dtype, error", [("float32", 1e-5), ("bfloat16", 0.1)])
@pytest.mark.parametrize("shape", [(16,), (3, 16), (2, 5, 16), (2, 5, 3, 16)])
def test_norm_and_its_gradients_are_those_of_the_formula(shape, dtype, error):
  key = jax.random.key(len(shape))
  shapes = shape, shape[-1:], shape
  x, scale, grad = (
    jax.random.normal(k, s, dtype)
    for k, s in zip(jax.random.split(key, 3), shapes, strict=True)
  )
  actual = _with_grads(lambda x, s: layers.rms_norm(x, s, EPS), x, scale, grad)
  assert [a.dtype for a in actual] == [dtype] * 3
  want = _with_grads(_plain, *(a.astype("float32") for a in (x, scale, grad)))
  for a, b in zip(actual, want, strict=True):
    np.testing.assert_allclose(a.astype("float32"), b, rtol=error, atol=error)


def test_linear_contracts_the_first_axis_of_a_weight():
  rng = np.random.default_rng(0)
  x, weight = rng.normal(size=(2, 3, 4)), rng.normal(size=(4, 5, 6))
  actual = layers.linear(jnp.float32(x), jnp.float32(weight))
  np.testing.assert_allclose(actual, np.tensordot(x, weight, 1), atol=1e-5)


def test_products_of_rotated_vectors_depend_on_their_distance_alone():
  q, k = jax.random.normal(jax.random.key(0), (2, 1, 16))
  cos, sin = layers.cos_sin_table(12, 16, theta=100.0)
  q, k = jnp.broadcast_to(jnp.stack([q, k])[:, None], (2, 12, 1, 16))
  q, k = (layers.apply_rope(x, cos, sin)[:, 0] for x in (q, k))
  products = np.asarray(q @ k.T)  # [position of q, position of k]
  for distance in range(12):
    along = np.diagonal(products, distance)
    np.testing.assert_allclose(along, along[0], atol=1e-4)
  assert np.ptp(products[:, 0]) > 0.1
