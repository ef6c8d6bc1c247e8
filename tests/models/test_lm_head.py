"""The head in chunks: log-softmax at the tokens that are needed."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dppo_jax import sharding
from dppo_jax.models import lm_head


def _arguments(needed_share=0.6):
  keys = jax.random.split(jax.random.key(0), 5)
  hidden = jax.random.normal(keys[0], (2, 12, 8))
  weight = jax.random.normal(keys[1], (20, 8))
  targets = jax.random.randint(keys[2], (2, 12), 0, 20)
  is_needed = jax.random.uniform(keys[3], (2, 12)) < needed_share
  return hidden, weight, targets, is_needed, jax.random.normal(keys[4], (2, 12))


@pytest.mark.parametrize("logit_chunk", [1, 8, 1000])
@pytest.mark.parametrize("needed_share", [0.0, 0.6, 1.1])
def test_chunked_head_equals_log_softmax(logit_chunk, needed_share):
  hidden, weight, targets, is_needed, grads = _arguments(needed_share)
  temperature = 0.7

  def plain(hidden, weight):
    logits = jnp.einsum("ble,ve->blv", hidden, weight) / temperature
    logprobs = jax.nn.log_softmax(logits)
    chosen = jnp.take_along_axis(logprobs, targets[..., None], -1)[..., 0]
    chosen = jnp.where(is_needed, chosen, 0.0)
    return (chosen * grads).sum(), chosen

  def chunked(hidden, weight):
    chosen, _ = lm_head.logprobs_and_entropy(
      hidden, weight, targets, is_needed, temperature, logit_chunk
    )
    return (chosen * grads).sum(), chosen

  both = lambda f: jax.jit(jax.value_and_grad(f, (0, 1), has_aux=True))
  jax.tree.map(
    functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5),
    both(chunked)(hidden, weight),
    both(plain)(hidden, weight),
  )


def test_logits_are_computed_only_where_needed():
  """The number of chunks follows the fullest row."""
  _, _, _, is_needed, _ = _arguments()
  columns = lm_head._ColumnChunks(
    is_needed & (jnp.arange(12) < 5), logit_chunk=4
  )
  fullest = int((is_needed[:, :5]).sum(axis=1).max())
  assert columns.width == 2 and int(columns.num_chunks) == -(-fullest // 2) < 6


@pytest.mark.parametrize("logit_chunk", [1, 8, 1000])
def test_the_entropy_is_that_of_the_distribution_and_has_no_gradient(
  logit_chunk,
):
  hidden, weight, targets, is_needed, _ = _arguments()
  arguments = (hidden, weight, targets, is_needed, 0.7, logit_chunk)
  actual = lm_head.logprobs_and_entropy(*arguments)
  logits = np.einsum("ble,ve->blv", hidden, weight).astype(np.float64) / 0.7
  probs = np.exp(logits - logits.max(-1, keepdims=True))
  probs /= probs.sum(-1, keepdims=True)
  of_target = np.take_along_axis(probs, np.asarray(targets)[..., None], -1)
  want = np.log(of_target[..., 0]), -(probs * np.log(probs)).sum(-1)
  for x, y in zip(actual, want, strict=True):
    np.testing.assert_allclose(x, np.where(is_needed, y, 0.0), atol=1e-5)
  of_both = lambda x: sum(
    map(jnp.sum, lm_head.logprobs_and_entropy(x, *others))
  )
  of_one = lambda x: lm_head.logprobs_and_entropy(x, *others)[0].sum()
  others = arguments[1:]
  np.testing.assert_array_equal(
    jax.grad(of_both)(hidden), jax.grad(of_one)(hidden)
  )


def test_shards_of_a_mesh_come_to_the_result_of_one_device():
  hidden, weight, targets, is_needed, grads = (
    jnp.concatenate([x, x[::-1]]) if x.shape[0] == 2 else x
    for x in _arguments()
  )

  def loss(hidden, weight):
    arguments = (hidden, weight, targets, is_needed, 0.7, 8)
    chosen, _ = lm_head.logprobs_and_entropy(*arguments)
    return (chosen * grads).sum()

  want = jax.value_and_grad(loss, (0, 1))(hidden, weight)
  mesh = sharding.make_mesh(data=4, model=2)
  places = (
    sharding.sharding(mesh, "batch"),
    sharding.sharding(mesh, "vocab", "embed"),
  )
  with jax.set_mesh(mesh):
    arrays = jax.device_put((hidden, weight), places)
    program = jax.jit(
      jax.value_and_grad(loss, (0, 1)), out_shardings=(None, places)
    )
    actual = program(*arrays)
  for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(want), strict=True):
    np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)
