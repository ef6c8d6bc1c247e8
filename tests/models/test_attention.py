"""Attention: every backend is the plain formula, and no segment leaks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dppo_jax import sharding
from dppo_jax.models import attention, blockwise, kernels

BACKENDS = {
  "xla": blockwise.attention,
  "splash": functools.partial(kernels.splash, interpret=True),
  "triton": functools.partial(kernels.triton, interpret=True),
}
# Completions of a prompt, completions alone, padding at the end of a row.
SEGMENTS = {
  "shared": [(5, (9, 40, 3)), (30, (70, 12)), (4, (50,))],
  "apart": [(0, (100,)), (0, (31,)), (0, (64,))],
  "mixed": [(0, (7,)), (120, (20, 30, 1)), (0, (40,))],
  "whole": [(0, (256,))],
  "short": [(2, (3, 2))],
}


def _ids(groups, length):
  """Segment and prefix ids of one row."""
  segments, prefixes = [], []
  for prefix, completions in groups:
    first = max(segments, default=0) + 1
    segments += [first] * prefix
    prefixes += [first] * prefix
    for i, size in enumerate(completions):
      own = first + i + (prefix > 0)
      segments += [own] * size
      prefixes += [first if prefix else own] * size
  pad = [0] * (length - len(segments))
  return segments + pad, prefixes + pad


def _rows(length, names=tuple(SEGMENTS)):
  ids = np.array([_ids(SEGMENTS[name], length) for name in names], np.int32)
  return jnp.array(ids[:, 0]), jnp.array(ids[:, 1])


def _inputs(rows, length, heads=4, kv_heads=2, dim=16, seed=0):
  make = lambda i, h: jax.random.normal(
    jax.random.key(seed + i), (rows, length, h, dim)
  )
  return make(0, heads), make(1, kv_heads), make(2, kv_heads)


def _plain(q, k, v, segment_ids, prefix_ids):
  """The formula, with every score at once."""
  repeat = q.shape[2] // k.shape[2]
  k, v = (jnp.repeat(x, repeat, axis=2) for x in (k, v))
  scores = jnp.einsum("bqhd,bshd->bhqs", q, k) * q.shape[-1] ** -0.5
  keys = segment_ids[:, None, :]
  is_seen = (segment_ids[:, :, None] == keys) | (prefix_ids[:, :, None] == keys)
  is_seen &= jnp.tri(q.shape[1], dtype=bool)
  share = jax.nn.softmax(jnp.where(is_seen[:, None], scores, -jnp.inf), -1)
  return jnp.einsum("bhqs,bshd->bqhd", share, v)


def _with_slopes(run, q, k, v, ids):
  """What comes out, and the slopes of a sum of it over real cells."""
  noise = jax.random.normal(jax.random.key(9), q.shape)
  noise = jnp.where((ids[0] > 0)[..., None, None], noise, 0)

  def loss(q, k, v):
    out = run(q, k, v, *ids)
    return (out * noise.astype(out.dtype)).sum(), out

  slopes, out = jax.grad(loss, (0, 1, 2), has_aux=True)(q, k, v)
  return jnp.where((ids[0] > 0)[..., None, None], out, 0), slopes


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_backend_is_the_plain_formula(backend):
  ids = _rows(256)
  inputs = _inputs(len(SEGMENTS), 256)
  got = jax.jit(functools.partial(_with_slopes, BACKENDS[backend]))(
    *inputs, ids
  )
  want = jax.jit(functools.partial(_with_slopes, _plain))(*inputs, ids)
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, atol=2e-5), got, want
  )


@pytest.mark.parametrize("length", [8, 40, 256, 333])
def test_xla_takes_rows_of_any_length(length):
  """Those that are shorter than a block, and no whole number of them."""
  ids = _rows(length, ("short",) if length < 256 else tuple(SEGMENTS))
  inputs = _inputs(len(ids[0]), length)
  got = _with_slopes(blockwise.attention, *inputs, ids)
  want = _with_slopes(_plain, *inputs, ids)
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, atol=2e-5), got, want
  )


@pytest.mark.parametrize("together", [2, 6])
def test_rows_that_are_handled_at_once_stay_apart(together):
  ids = tuple(jnp.concatenate([x, x[::-1]])[:6] for x in _rows(333))
  inputs = _inputs(6, 333)
  run = functools.partial(blockwise.attention, together=together)
  got = _with_slopes(run, *inputs, ids)
  want = _with_slopes(_plain, *inputs, ids)
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, atol=2e-5), got, want
  )


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_a_cell_may_not_see_does_not_change_it(backend):
  """Bit for bit, by other numbers wherever it must not look."""
  length = 256
  ids = _rows(length, ("mixed",))
  q, k, v = _inputs(1, length)
  run = jax.jit(BACKENDS[backend])
  before = run(q, k, v, *ids)
  segments, prefixes = np.asarray(ids[0][0]), np.asarray(ids[1][0])
  for cell in (3, 60, 130, 150, 170, 200):
    is_seen = np.isin(segments, (segments[cell], prefixes[cell]))
    is_seen &= np.arange(length) <= cell
    hide = lambda x, seen=is_seen: jnp.where(
      seen[None, :, None, None], x, 7 - 3 * x
    )
    after = run(q, hide(k), hide(v), *ids)
    np.testing.assert_array_equal(after[0, cell], before[0, cell])
    shown = run(q, hide(k), v + 1, *ids)
    assert not np.allclose(shown[0, cell], before[0, cell], atol=1e-3)


def test_blocks_that_share_no_segment_are_not_read():
  """Not even where they hold no numbers: such a block is never computed.

  Neither of sequences that do not see each other, nor of completions that
  stand between another one and the prompt that they share.
  """
  length = 512
  block = blockwise.BLOCK
  segment = jnp.arange(length, dtype=jnp.int32)[None] // block + 1
  q, k, v = _inputs(1, length)
  for prefix, spoilt in ((segment, 0), (jnp.ones_like(segment), 1)):

    def run(q, k, v, prefix=prefix):
      return blockwise.attention(q, k, v, segment, prefix)

    here = slice(spoilt * block, (spoilt + 1) * block)
    out, pull = jax.vjp(run, q, k, v.at[:, here].set(jnp.nan))
    for x in (out, pull(jnp.ones_like(out))[0]):
      assert jnp.isnan(x[:, here]).all()
      assert not jnp.isnan(x.at[:, here].set(0)).any()


def test_no_row_computes_what_another_one_sees():
  """Row 0 is one sequence, row 1 one in each block, row 2 is empty."""
  length, block = 256, blockwise.BLOCK
  each = jnp.arange(length, dtype=jnp.int32) // block + 1
  segment = jnp.stack([jnp.ones_like(each), each, jnp.zeros_like(each)])
  q, k, v = _inputs(3, length)
  v = v.at[1:, :block].set(jnp.nan)
  run = lambda q: blockwise.attention(q, k, v, segment, segment)
  out, pull = jax.vjp(run, q)
  for x in (out, pull(jnp.ones_like(out))[0]):
    assert jnp.isnan(x[1:, :block]).all()
    assert not jnp.isnan(x[1:, block:]).any()
    assert not jnp.isnan(x[0]).any()


def test_prompts_side_by_side_are_each_alone():
  lengths = jnp.array([1, 2, 63, 64, 65, 90, 128, 149, 150], jnp.int32)
  q, k, v = _inputs(lengths.size, 150)
  got = attention.attend_prompts(q, k, v, lengths)
  for i, length in enumerate(lengths):
    alone = [x[i : i + 1, :length] for x in (q, k, v)]
    ids = jnp.ones((1, length), jnp.int32)
    np.testing.assert_allclose(
      got[i, :length], _plain(*alone, ids, ids)[0], atol=2e-5
    )


def test_a_mesh_changes_nothing():
  """Rows of many blocks, other ids in each, over 4 x 2 devices."""
  ids = tuple(jnp.concatenate([x, x[::-1]])[:8] for x in _rows(256))
  run = functools.partial(_with_slopes, attention.attention)
  inputs = _inputs(8, 256)
  alone = jax.jit(run)(*inputs, ids)
  mesh = sharding.make_mesh(4, 2)
  with jax.set_mesh(mesh):
    rows = lambda x: jax.device_put(x, sharding.sharding(mesh, "batch", None))
    heads = sharding.sharding(mesh, "batch", None, "heads", None)
    inputs = [jax.device_put(x, heads) for x in inputs]
    spread = jax.jit(run)(*inputs, tuple(map(rows, ids)))
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, atol=2e-5), spread, alone
  )


def test_bfloat16_is_the_plain_formula_rounded():
  ids = _rows(256)
  inputs = _inputs(len(SEGMENTS), 256)
  small = [x.astype(jnp.bfloat16) for x in inputs]
  got = _with_slopes(blockwise.attention, *small, ids)
  want = _with_slopes(_plain, *inputs, ids)
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(
      x.astype(jnp.float32), y, atol=0.05, rtol=0.05
    ),
    got,
    want,
  )


@pytest.mark.parametrize("backend", ["splash", "triton"])
def test_kernels_refuse_rows_that_are_not_whole_blocks(backend):
  ids = jnp.ones((1, 200), jnp.int32)
  with pytest.raises(ValueError, match="row_length is 200"):
    BACKENDS[backend](*_inputs(1, 200), ids, ids)


def test_every_backend_is_tested():
  assert set(BACKENDS) == set(attention.BACKENDS)
