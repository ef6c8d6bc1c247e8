"""The cache: attention over its parts, and what is moved between slots."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dppo_jax.models import kv_cache
from tests.helpers import small

SIZES = [2, 2, 4]  # positions of each part


# In three groups of two layers.
MODEL = dataclasses.replace(small.MODEL, layers=6, kv_heads=2, head_dim=3)


def _filled(num_slots, sizes=tuple(SIZES), seed=0):
  """A cache of distinct numbers."""
  rng = np.random.default_rng(seed)
  empty = jax.eval_shape(lambda: kv_cache.init(MODEL, num_slots, sizes))
  return jax.tree.map(lambda x: jnp.float32(rng.normal(size=x.shape)), empty)


def _slot(cache, slot):
  return [np.asarray(x[:, slot]) for x in jax.tree.leaves(cache)]


def _assert_equal(actual, expected):
  assert len(actual) == len(expected)
  jax.tree.map(np.testing.assert_array_equal, actual, expected)


def test_attention_over_parts_is_the_plain_formula():
  rng = jax.random.split(jax.random.key(0), 3)
  q = jax.random.normal(rng[0], (5, 4, 8))
  cache = [jax.random.normal(k, (2, 5, 2, 256, 8)) for k in rng[1:]]
  positions = jnp.array([63, 3, 64, 127, 128])
  parts = [
    kv_cache.KVPart(keys.swapaxes(3, 4), values)
    for keys, values in zip(
      *(jnp.split(x, [64, 128], 3) for x in cache), strict=True
    )
  ]

  @jax.jit
  def read(positions, parts=tuple(parts)):
    cache = kv_cache.LayerCache(parts, jnp.int32(1))
    return kv_cache.attend(q, cache, positions)

  k, v = (jnp.repeat(x[1], 2, axis=1) for x in cache)
  logits = jnp.einsum("bhd,bhsd->bhs", q, k) * 8**-0.5
  is_seen = jnp.arange(256) <= positions[:, None]
  probs = jax.nn.softmax(jnp.where(is_seen[:, None], logits, -jnp.inf), -1)
  plain = jnp.einsum("bhs,bhsd->bhd", probs, v)
  np.testing.assert_allclose(read(positions), plain, atol=1e-6)
  # Bit for bit: how far the other slots are does not matter.
  for others, same in (([64, 0, 0], 3), ([0, 0, 0], 2)):
    actual = read(jnp.array([63, 3, *others]))
    np.testing.assert_array_equal(actual[:same], read(positions)[:same])
  # Parts that no slot has reached are not read: 0 times NaN would be NaN.
  parts[2] = kv_cache.KVPart(*(jnp.full_like(x, jnp.nan) for x in parts[2]))
  assert jnp.isfinite(read(positions - 1, tuple(parts))).all()


@pytest.mark.parametrize("capacity", [1, 100, 128, 129, 700, 4000])
def test_parts_hold_what_is_asked_and_a_prompt_reaches_some(capacity):
  sizes = kv_cache.part_sizes(capacity)
  assert capacity <= sum(sizes) and sizes[0] >= min(128, capacity)
  for longest in {1, capacity // 2, capacity} - {0}:
    reached = kv_cache.prompt_part_sizes(sizes, longest)
    assert reached == sizes[: len(reached)]
    assert sum(reached[:-1]) < longest <= sum(reached)
    assert kv_cache.prompt_paddings(longest)[-1] == longest


def test_a_prompt_written_at_once_is_its_tokens_written_one_by_one():
  k, v = jax.random.normal(jax.random.key(1), (2, 2, 5, 2, 3))
  empty = kv_cache.init(MODEL, 2, SIZES)
  one_layer = kv_cache.LayerCache(empty[0], jnp.int32(0))
  cache = one_layer
  for i in range(5):
    at = jnp.full(2, i, jnp.int32)
    cache = kv_cache.write_tokens(cache, k[:, i], v[:, i], at)
  _assert_equal(cache, kv_cache.write_prompts(one_layer, k, v))


def test_layers_use_their_own_weights_and_rows_in_order():
  weights = tuple(jnp.arange(6.0)[i::3] for i in range(3))
  cache = kv_cache.init(MODEL, 1, SIZES)

  def layer(x, weight, cache):
    k = jnp.full((1, 2, 3), weight)
    cache = kv_cache.write_tokens(cache, k, k, jnp.zeros(1, jnp.int32))
    return x * 10 + weight, cache

  x, cache = kv_cache.scan_layers(layer, jnp.float32(0), weights, cache)
  assert x == 12345
  written = [np.asarray(group[0].keys[:, 0, 0, 0, 0]) for group in cache]
  np.testing.assert_array_equal(np.stack(written, 1).ravel(), np.arange(6))


def test_a_slot_is_copied_from_a_cache_of_fewer_parts():
  cache, source = _filled(4), _filled(3, SIZES[:2], seed=50)
  copied = jax.jit(kv_cache.copy_slot)(
    cache, jnp.int32(2), source, jnp.int32(1)
  )
  taken = jax.jit(kv_cache.take_slots)(copied, jnp.array([2, 0]))
  _assert_equal(_slot(taken, 0), _slot(copied, 2))
  _assert_equal(_slot(taken, 1), _slot(cache, 0))
  for slot in (0, 1, 3):
    _assert_equal(_slot(copied, slot), _slot(cache, slot))
  for group, before, other in zip(copied, cache, source, strict=True):
    _assert_equal(_slot(group[:2], 2), _slot(other, 1))
    _assert_equal(_slot(group[2:], 2), _slot(before[2:], 2))


def test_rewriting_the_cache_equals_writing_tokens():
  cache = _filled(4)
  rng = np.random.default_rng(1)
  k, v = jnp.float32(rng.normal(size=(2, 4, 2, 3)))
  layer = kv_cache.LayerCache(cache[1], jnp.int32(1))
  positions = jnp.array([0, 2, 7, 8], jnp.int32)  # the last is beyond
  written, chosen = (
    kv_cache.write_tokens(layer, k, v, positions, rewrites)
    for rewrites in (False, True)
  )
  _assert_equal(chosen, written)


@pytest.mark.parametrize("backend", ["tokamax", "xla_dense", "xla", "splash"])
def test_rollouts_on_gpus_have_no_loop_over_layers(backend):
  """A loop would copy each layer's weights."""
  model = dataclasses.replace(small.MODEL, layers=14, attention=backend)
  is_gpu = backend in ("tokamax", "xla_dense")
  assert kv_cache.num_groups(model) == (14 if is_gpu else 2)
