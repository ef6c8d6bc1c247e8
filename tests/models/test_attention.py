"""Attention: every backend is the plain formula, and no segment leaks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dppo_jax import sharding
from dppo_jax.models import attention
from dppo_jax.models.attention import blockwise, flash_kernel, splash_kernel

BACKENDS = attention.BACKENDS | {
  "splash": functools.partial(splash_kernel.attention, interpret=True)
}
pytestmark = pytest.mark.usefixtures("gpu_kernels")
# Groups of a row: (tokens of a shared prompt, or 0; tokens of completions).
SEGMENTS = {
  "shared": [(5, (9, 40, 3)), (30, (70, 12)), (4, (50,))],
  "apart": [(0, (100,)), (0, (31,)), (0, (64,))],
  "mixed": [(0, (7,)), (120, (20, 30, 1)), (0, (40,))],
  "whole": [(0, (256,))],
  "short": [(2, (3, 2))],
  "gap": [(3, (70, 60, 100))],
}


def _ids(groups, length):
  """Segment and prefix ids of one row."""
  segments, prefixes = [], []
  for prefix, completions in groups:
    first = max(segments, default=0) + 1
    segments += [first] * prefix
    prefixes += [first] * prefix
    for i, size in enumerate(completions):
      completion = first + i + (prefix > 0)
      segments += [completion] * size
      prefixes += [first if prefix else completion] * size
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


def _positions(groups, length):
  """Each token's position in its sequence: completions follow their prompt."""
  positions = []
  for prefix, completions in groups:
    positions += range(prefix)
    for size in completions:
      positions += range(prefix, prefix + size)
  return positions + [0] * (length - len(positions))


def _plain(q, k, v, segment_ids, prefix_ids, window=None):
  """The formula, with all logits at once."""
  repeat = q.shape[2] // k.shape[2]
  k, v = (jnp.repeat(x, repeat, axis=2) for x in (k, v))
  logits = jnp.einsum("bqhd,bshd->bhqs", q, k) * q.shape[-1] ** -0.5
  keys = segment_ids[:, None, :]
  is_seen = (segment_ids[:, :, None] == keys) | (prefix_ids[:, :, None] == keys)
  is_seen &= jnp.tri(q.shape[1], dtype=bool)
  if window is not None:
    position, oldest = window
    is_seen &= position[:, None, :] >= oldest[:, :, None]
  probs = jax.nn.softmax(
    jnp.where(is_seen[:, None], logits, blockwise.MASKED), -1
  )
  return jnp.einsum("bhqs,bshd->bqhd", probs, v)


@functools.partial(jax.jit, static_argnums=0)
def _with_grads(run, q, k, v, ids):
  """The output at real tokens, and the gradients of a weighted sum of it."""
  is_real = (ids[0] > 0)[..., None, None]
  noise = jax.random.normal(jax.random.key(9), q.shape)
  noise = jnp.where(is_real, noise, 0)

  def loss(q, k, v):
    out = run(q, k, v, *ids)
    return (out * noise.astype(out.dtype)).sum(), out

  grads, out = jax.grad(loss, (0, 1, 2), has_aux=True)(q, k, v)
  return jnp.where(is_real, out, 0), grads


def _assert_close(actual, expected, atol=2e-5, rtol=1e-7):
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(
      x.astype(jnp.float32), y, atol=atol, rtol=rtol
    ),
    actual,
    expected,
  )


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_backend_is_the_plain_formula(backend):
  ids = _rows(256)
  inputs = _inputs(len(SEGMENTS), 256)
  actual = _with_grads(BACKENDS[backend], *inputs, ids)
  _assert_close(actual, _with_grads(_plain, *inputs, ids))


@pytest.mark.parametrize("size", [1, 7, 65])
@pytest.mark.parametrize(
  "backend", ["xla", "xla_by_row", "xla_dense", "triton"]
)
def test_a_window_counts_positions_of_the_sequence(backend, size):
  """Other completions between a prompt and its completion do not count."""
  rows = [_positions(groups, 256) for groups in SEGMENTS.values()]
  position = jnp.array(rows, jnp.int32)
  ids = *_rows(256), (position, position - size + 1)
  inputs = _inputs(len(SEGMENTS), 256)
  run = lambda q, k, v, segment_ids, prefix_ids, window: BACKENDS[backend](
    q, k, v, segment_ids, prefix_ids, window=window
  )
  actual = _with_grads(run, *inputs, ids)
  _assert_close(actual, _with_grads(_plain, *inputs, ids))


def test_large_heads_have_smaller_blocks():
  """Block ranges that are computed once have the size of the kernel's."""
  ids, inputs = _rows(256), _inputs(len(SEGMENTS), 256, 2, 1, dim=256)
  ranges = attention.block_ranges(*ids, "triton", 256)
  assert len(ranges[0][0]) == 256 // 32
  run = lambda *x: BACKENDS["triton"](*x, ranges=ranges)
  _assert_close(
    _with_grads(run, *inputs, ids), _with_grads(_plain, *inputs, ids), 1e-4
  )


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_without_prefixes_need_no_prefix_ids(backend):
  segment_ids = _rows(128, ("short", "short"))[0]
  segment_ids = segment_ids.at[1].set(jnp.arange(128, dtype=jnp.int32) // 50)
  inputs = _inputs(2, 128)
  actual = _with_grads(BACKENDS[backend], *inputs, (segment_ids,))
  want = _with_grads(_plain, *inputs, (segment_ids, segment_ids))
  _assert_close(actual, want)


@pytest.mark.parametrize(
  ("length", "rows_at_once"), [(8, 1), (40, 1), (333, 1), (333, 2), (333, None)]
)
def test_xla_takes_rows_of_any_length(length, rows_at_once):
  names = ("short", "short") if length < 256 else tuple(SEGMENTS)[:4]
  ids = _rows(length, names)
  inputs = _inputs(len(ids[0]), length)
  run = functools.partial(blockwise.attention, rows_at_once=rows_at_once)
  actual = _with_grads(run, *inputs, ids)
  _assert_close(actual, _with_grads(_plain, *inputs, ids))
  if rows_at_once is None:
    small = [x.astype(jnp.bfloat16) for x in inputs]
    _assert_close(_with_grads(run, *small, ids), actual, atol=0.05, rtol=0.05)


@pytest.mark.parametrize("backend", BACKENDS)
def test_masked_tokens_have_no_effect(backend):
  """Outputs are bit-identical for other numbers at masked positions."""
  length = 256
  ids = _rows(length, ("mixed",))
  q, k, v = _inputs(1, length)
  run = jax.jit(BACKENDS[backend])
  before = run(q, k, v, *ids)
  segments, prefixes = np.asarray(ids[0][0]), np.asarray(ids[1][0])
  for token in (3, 60, 130, 150, 170, 200):
    is_seen = np.isin(segments, (segments[token], prefixes[token]))
    is_seen &= np.arange(length) <= token
    hide = lambda x, seen=is_seen: jnp.where(
      seen[None, :, None, None], x, 7 - 3 * x
    )
    after = run(q, hide(k), hide(v), *ids)
    np.testing.assert_array_equal(after[0, token], before[0, token])
    shown = run(q, hide(k), v + 1, *ids)
    assert not np.allclose(shown[0, token], before[0, token], atol=1e-3)


@functools.partial(jax.jit, static_argnums=4)
def _with_dq(q, k, v, ids, run=blockwise.attention):
  out, pull = jax.vjp(lambda q: run(q, k, v, *ids), q)
  return out, pull(jnp.ones_like(out))[0]


def test_blocks_that_share_no_segment_are_not_read():
  """Blocks of NaNs have no effect: they are never computed.

  This holds for sequences that do not see each other, and for completions
  between another one and their shared prompt.
  """
  length = 512
  block = blockwise.BLOCK
  segment = jnp.arange(length, dtype=jnp.int32)[None] // block + 1
  q, k, v = _inputs(1, length)
  for prefix, spoilt in ((segment, 0), (jnp.ones_like(segment), 1)):
    here = slice(spoilt * block, (spoilt + 1) * block)
    v_spoilt = v.at[:, here].set(jnp.nan)
    for x in _with_dq(q, k, v_spoilt, (segment, prefix)):
      assert jnp.isnan(x[:, here]).all()
      assert not jnp.isnan(x.at[:, here].set(0)).any()


def test_blocks_before_a_window_are_not_read():
  q, k, v = _inputs(1, 512)
  block, position = blockwise.BLOCK, jnp.arange(512, dtype=jnp.int32)[None]
  ids = jnp.ones_like(position)
  window = position, position - block + 1  # it reaches into the block before
  v = v.at[:, :block].set(jnp.nan)
  for x in _with_dq(q, k, v, (ids, ids, window)):
    assert jnp.isnan(x[:, :block]).all()
    assert not jnp.isnan(x[:, 2 * block :]).any()


@pytest.mark.parametrize(
  ("groups", "num_blocks"),
  [
    ([], 16),  # padding sees itself
    ([(0, (500,)), (0, (300,))], 36 + 20 + 3),  # the second from block 7 on
    # The prompt's block, four completions that each read it, and padding.
    ([(64, (128, 128, 128, 128))], 1 + 4 * (2 + 3) + 7),
  ],
)
def test_the_kernel_for_gpus_reads_few_blocks(groups, num_blocks):
  """Numbers of pairs of blocks of 64 tokens, forward and backward."""
  ids = (jnp.array([x], jnp.int32) for x in _ids(groups, 1024))
  first, stop, resume, last = flash_kernel.block_ranges(*ids, head_dim=128)
  index = jnp.arange(16)
  assert (index + 1 - first - (resume - stop)).sum() == num_blocks
  assert (last + 1 - index).sum() <= num_blocks + 3


def test_rows_do_not_compute_blocks_of_other_rows():
  """Row 0 is one sequence, row 1 one in each block, row 2 is empty."""
  length, block = 256, blockwise.BLOCK
  each = jnp.arange(length, dtype=jnp.int32) // block + 1
  segment = jnp.stack([jnp.ones_like(each), each, jnp.zeros_like(each)])
  q, k, v = _inputs(3, length)
  v = v.at[1:, :block].set(jnp.nan)
  for x in _with_dq(q, k, v, (segment, segment)):
    assert jnp.isnan(x[1:, :block]).all()
    assert not jnp.isnan(x[1:, block:]).any()
    assert not jnp.isnan(x[0]).any()


@pytest.mark.parametrize(
  ("backend", "size"),
  [
    *((name, None) for name in BACKENDS),
    *((name, 7) for name in BACKENDS if name != "splash"),
  ],
)
def test_padded_prompts_do_not_affect_each_other(backend, size, monkeypatch):
  """Kernels pad the rows of 150 tokens. With windows of `size`."""
  monkeypatch.setitem(attention.BACKENDS, backend, BACKENDS[backend])
  lengths = jnp.array([1, 2, 63, 64, 90, 128, 149, 150], jnp.int32)
  inputs = _inputs(8, 150)
  is_real = jnp.arange(150) < lengths[:, None]
  hide = lambda x: jnp.where(is_real[..., None, None], x, 0)
  position = jnp.broadcast_to(jnp.arange(150, dtype=jnp.int32), (8, 150))
  window = size and (position, position - size + 1)
  run = jax.jit(
    lambda *x: attention.attend_prompts(*x, backend, window and window[1])
  )
  actual = run(*inputs, lengths)
  ids = is_real.astype(jnp.int32)
  _assert_close(hide(actual), hide(jax.jit(_plain)(*inputs, ids, ids, window)))


@pytest.mark.parametrize("backend", ["xla_by_row", "splash"])
def test_prompts_may_be_attended_inside_a_shard_map(backend, monkeypatch):
  """In a rollout, rows are already one shard's but heads are not divided."""
  monkeypatch.setitem(attention.BACKENDS, backend, BACKENDS[backend])
  q, k, v = _inputs(4, 130)
  lengths = jnp.array([1, 70, 129, 130], jnp.int32)
  run = lambda *x: attention.attend_prompts(*x, backend)
  alone = jax.jit(run)(q, k, v, lengths)
  mesh = sharding.make_mesh(2, 2)
  shards = (jax.P("data"),) * 4
  with jax.set_mesh(mesh):
    on_shards = jax.shard_map(
      run,
      in_specs=shards,
      out_specs=jax.P("data"),
      axis_names={"data"},
      check_vma=False,
    )
    spread = jax.jit(on_shards)(q, k, v, lengths)
  _assert_close(spread, alone)


def test_a_mesh_changes_nothing():
  """Rows of many blocks, other ids in each, over 4 x 2 devices."""
  ids = tuple(jnp.concatenate([x, x[::-1]])[:8] for x in _rows(256))
  run = functools.partial(attention.attention, backend="xla_by_row")
  inputs = _inputs(8, 256)
  alone = _with_grads(run, *inputs, ids)
  mesh = sharding.make_mesh(4, 2)
  with jax.set_mesh(mesh):
    rows = lambda x: jax.device_put(x, sharding.sharding(mesh, "batch", None))
    heads = sharding.sharding(mesh, "batch", None, "heads", None)
    inputs = [jax.device_put(x, heads) for x in inputs]
    spread = _with_grads(run, *inputs, tuple(map(rows, ids)))
  _assert_close(spread, alone)


# name, platform, row_length, group_size, head_dim -> backend
CHOSEN = {
  ("auto", "cpu", 1024, 8, 128): "xla_by_row",
  ("xla", "cpu", 1024, 8, 128): "xla_by_row",
  ("auto", "gpu", 1024, 8, 128): "triton",
  ("auto", "gpu", 160, 8, 16): "triton",
  ("auto", "gpu", 1000, 8, 128): "xla_dense",
  ("auto", "gpu", 1024, 8, 96): "xla_dense",
  ("xla", "gpu", 1024, 8, 128): "xla_dense",
  ("xla", "tpu", 1024, 8, 128): "xla",
  ("auto", "tpu", 1024, 8, 128): "splash",
  ("auto", "tpu", 1024, 8, 96): "splash",
  ("auto", "tpu", 1000, 8, 128): "xla",
  ("auto", "tpu", 1024, 65, 128): "xla",
  ("splash", "tpu", 1024, 64, 128): "splash",
  ("triton", "gpu", 1024, 8, 128): "triton",
  ("splash", "cpu", 1024, 8, 128): None,
  ("triton", "tpu", 1024, 8, 128): None,
  ("splash", "tpu", 1000, 8, 128): None,
  ("triton", "gpu", 1024, 65, 128): "triton",
  ("triton", "gpu", 1000, 8, 128): None,
  ("triton", "gpu", 1024, 8, 96): None,
}


def test_windows_and_large_heads_suit_some_kernels():
  choose = attention.choose_backend
  shapes = "tpu", 1024, 8, 128
  assert choose("auto", *shapes, has_window=True) == "xla"
  with pytest.raises(ValueError, match=r"no window, not .* shorter than"):
    choose("splash", *shapes, has_window=True)
  assert choose("auto", "gpu", 1024, 8, 128, has_window=True) == "triton"
  large = "gpu", 1024, 8, 256
  assert choose("auto", *large) == "xla_dense"
  assert choose("auto", *large, dtype="bfloat16") == "triton"
  with pytest.raises(ValueError, match="256 and float32: set it to auto"):
    choose("triton", *large)


@pytest.mark.parametrize("case", CHOSEN, ids=str)
def test_backend_suits_the_platform_and_the_rows(case):
  if CHOSEN[case]:
    assert attention.choose_backend(*case) == CHOSEN[case]
    return
  with pytest.raises(ValueError, match=r"config.model.attention=.* to auto"):
    attention.choose_backend(*case)
