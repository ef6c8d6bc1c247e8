"""Attention: every backend is the plain formula, and no segment leaks."""

import functools
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dppo_jax import sharding
from dppo_jax.errors import UserError
from dppo_jax.models import attention
from dppo_jax.models.attention import blockwise, masked, splash_kernel

BACKENDS = attention.BACKENDS | {
  "splash": functools.partial(splash_kernel.attention, interpret=True)
}
HAS_TOKAMAX = importlib.util.find_spec("tokamax") is not None
# On a CPU tokamax computes in plain XLA.
NAMES = [
  pytest.param(
    name,
    marks=pytest.mark.skipif(
      name == "tokamax" and not HAS_TOKAMAX, reason="tokamax is not installed"
    ),
  )
  for name in BACKENDS
]
# Trees of a row: a number of tokens, or `(tokens, trees that continue them)`.
TREES = {
  "shared": [(5, (9, 40, 3)), (30, (70, 12)), (4, (50,))],
  "apart": [100, 31, 64],
  "mixed": [7, (120, (20, 30, 1)), 40],
  "whole": [256],
  "short": [(2, (3, 2))],
  "gap": [(3, (70, 60, 100))],
  "three levels": [(6, ((20, (30, 9, 40)), (17, (5, 50)), 33)), (3, (40,))],
}


def _ends(trees, start=0):
  """Returns the end of each position."""
  ends = []
  for tree in trees:
    size, children = (tree, ()) if isinstance(tree, int) else tree
    inner = _ends(children, start + size)
    start += size + len(inner)
    ends += [start] * size + inner
  return ends


def _rows(length, names=tuple(TREES)):
  """Returns the ends of rows, 0 in padding."""
  ends = [_ends(TREES[name]) for name in names]
  return jnp.array([x + [0] * (length - len(x)) for x in ends], jnp.int32)


def _inputs(rows, length, heads=4, kv_heads=2, dim=16, seed=0):
  make = lambda i, h: jax.random.normal(
    jax.random.key(seed + i), (rows, length, h, dim)
  )
  return make(0, heads), make(1, kv_heads), make(2, kv_heads)


def _positions(trees, length, first=0):
  """Each token's position in its sequence: it continues its ancestors."""
  positions = []
  for tree in trees:
    size, children = (tree, ()) if isinstance(tree, int) else tree
    positions += range(first, first + size)
    positions += _positions(children, 0, first + size)
  return positions + [0] * (length - len(positions))


def _paths(trees, start=0, above=()):
  """Yields the positions of each path to a leaf, and which are the leaf's."""
  for tree in trees:
    size, children = (tree, ()) if isinstance(tree, int) else tree
    here = (*above, *range(start, start + size))
    if not children:
      yield np.array(here), np.arange(len(here)) >= len(above)
    yield from _paths(children, start + size, here)
    start += size + len(_ends(children))


def _is_seen(end):
  """Returns True where a query, of the second last axis, sees a key."""
  index = jnp.arange(end.shape[1])
  return (index <= index[:, None]) & (index[:, None] < end[:, None])


def _plain(q, k, v, end, window=None):
  """The formula, with all logits at once."""
  repeat = q.shape[2] // k.shape[2]
  k, v = (jnp.repeat(x, repeat, axis=2) for x in (k, v))
  logits = jnp.einsum("bqhd,bshd->bhqs", q, k) * q.shape[-1] ** -0.5
  is_seen = _is_seen(end)
  if window is not None:
    position, oldest = window
    is_seen &= position[:, None, :] >= oldest[:, :, None]
  probs = jax.nn.softmax(
    jnp.where(is_seen[:, None], logits, blockwise.MASKED), -1
  )
  return jnp.einsum("bhqs,bshd->bqhd", probs, v)


@functools.partial(jax.jit, static_argnums=0)
def _with_grads(run, q, k, v, end, window=None):
  """The output at real tokens, and the gradients of a weighted sum of it."""
  is_real = (end > 0)[..., None, None]
  noise = jax.random.normal(jax.random.key(9), q.shape)
  noise = jnp.where(is_real, noise, 0)

  def loss(q, k, v):
    out = run(q, k, v, attention.seen_by_itself(end), window=window)
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


def _skip_without_window(backend):
  if backend == "splash":
    pytest.skip("splash attention has no window")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("backend", NAMES)
def test_every_backend_is_the_plain_formula(backend, dtype):
  end, inputs = _rows(256), _inputs(len(TREES), 256)
  expected = _with_grads(_plain, *inputs, end)
  inputs = [x.astype(dtype) for x in inputs]
  with jax.numpy_dtype_promotion("standard"):  # for functions of JAX
    actual = _with_grads(BACKENDS[backend], *inputs, end)
  limits = {} if dtype == "float32" else {"atol": 0.06, "rtol": 0.06}
  _assert_close(actual, expected, **limits)


@pytest.mark.parametrize("backend", NAMES)
def test_three_levels_equal_each_path_alone(backend):
  """A prompt, first turns and completions of each, forward and backward."""
  trees, length = TREES["three levels"], 256
  end, inputs = _rows(length, ("three levels",)), _inputs(1, length)
  noise = jax.random.normal(jax.random.key(9), inputs[0].shape)
  paths = list(_paths(trees))
  assert len(paths) == 7
  is_leaf = jnp.zeros(length)
  for path, at_end in paths:
    is_leaf = is_leaf.at[path].set(at_end.astype(np.float32))

  def packed(q, k, v):
    out = BACKENDS[backend](q, k, v, attention.seen_by_itself(end))
    return (out * noise * is_leaf[None, :, None, None]).sum(), out

  def alone(q, k, v):
    total, outs = 0.0, []
    for path, at_end in paths:
      one = (x[:, path] for x in (q, k, v))
      outs.append(_plain(*one, jnp.full((1, len(path)), len(path))))
      total += (outs[-1] * noise[:, path])[:, at_end].sum()
    return total, outs

  (total, out), grads = jax.jit(
    jax.value_and_grad(packed, (0, 1, 2), has_aux=True)
  )(*inputs)
  (expected, outs), wanted = jax.jit(
    jax.value_and_grad(alone, (0, 1, 2), has_aux=True)
  )(*inputs)
  _assert_close(total, expected, atol=1e-3)
  _assert_close([out[:, path] for path, _ in paths], outs)
  _assert_close(grads, wanted)


@pytest.mark.parametrize("size", [1, 7, 65])
@pytest.mark.parametrize("backend", NAMES)
def test_a_window_counts_positions_of_the_sequence(backend, size):
  """Other completions between a prompt and its completion do not count."""
  _skip_without_window(backend)
  rows = [_positions(trees, 256) for trees in TREES.values()]
  position = jnp.array(rows, jnp.int32)
  args = _rows(256), (position, position - size + 1)
  inputs = _inputs(len(TREES), 256)
  actual = _with_grads(BACKENDS[backend], *inputs, *args)
  _assert_close(actual, _with_grads(_plain, *inputs, *args))


@pytest.mark.parametrize(
  "backend", [x for x in NAMES if "xla" not in x.values[0]]
)
def test_kernels_need_no_end_for_rows_of_one_sequence(backend):
  inputs = _inputs(2, 128)
  actual = jax.jit(BACKENDS[backend])(*inputs, None)
  _assert_close(actual, _plain(*inputs, jnp.full((2, 128), 128)))


@pytest.mark.parametrize(
  ("length", "rows_at_once"), [(8, 1), (40, 1), (333, 1), (333, 2), (333, None)]
)
def test_xla_takes_rows_of_any_length(length, rows_at_once):
  names = ("short", "short") if length < 256 else tuple(TREES)[:4]
  end = _rows(length, names)
  inputs = _inputs(len(end), length)
  run = functools.partial(blockwise.attention, rows_at_once=rows_at_once)
  actual = _with_grads(run, *inputs, end)
  _assert_close(actual, _with_grads(_plain, *inputs, end))


@pytest.mark.parametrize("backend", NAMES)
def test_masked_tokens_have_no_effect(backend):
  """Outputs are bit-identical for other numbers at masked positions."""
  length = 256
  end = attention.seen_by_itself(_rows(length, ("mixed",)))
  q, k, v = _inputs(1, length)
  run = jax.jit(BACKENDS[backend])
  before = run(q, k, v, end)
  for token in (3, 60, 130, 150, 170, 200):
    is_seen = _is_seen(end)[0, token]
    hide = lambda x, seen=is_seen: jnp.where(
      seen[None, :, None, None], x, 7 - 3 * x
    )
    after = run(q, hide(k), hide(v), end)
    np.testing.assert_array_equal(after[0, token], before[0, token])
    shown = run(q, hide(k), v + 1, end)
    assert not np.allclose(shown[0, token], before[0, token], atol=1e-3)


@functools.partial(jax.jit, static_argnums=5)
def _with_dq(q, k, v, end, window=None, run=blockwise.attention):
  end = attention.seen_by_itself(end)
  out, pull = jax.vjp(lambda q: run(q, k, v, end, window), q)
  return out, pull(jnp.ones_like(out))[0]


def test_blocks_that_see_no_key_are_not_read():
  """Blocks of NaNs have no effect: they are never computed.

  This holds for sequences that do not see each other, and for completions
  between another one and their shared prompt.
  """
  length = 512
  block = blockwise.BLOCK
  apart = (jnp.arange(length, dtype=jnp.int32)[None] // block + 1) * block
  q, k, v = _inputs(1, length)
  for end, spoilt in ((apart, 0), (apart.at[:, :block].set(length), 1)):
    here = slice(spoilt * block, (spoilt + 1) * block)
    v_spoilt = v.at[:, here].set(jnp.nan)
    for x in _with_dq(q, k, v_spoilt, end):
      assert jnp.isnan(x[:, here]).all()
      assert not jnp.isnan(x.at[:, here].set(0)).any()


def test_blocks_before_a_window_are_not_read():
  q, k, v = _inputs(1, 512)
  block, position = blockwise.BLOCK, jnp.arange(512, dtype=jnp.int32)[None]
  end = jnp.full_like(position, 512)
  window = position, position - block + 1  # it reaches into the block before
  v = v.at[:, :block].set(jnp.nan)
  for x in _with_dq(q, k, v, end, window):
    assert jnp.isnan(x[:, :block]).all()
    assert not jnp.isnan(x[:, 2 * block :]).any()


def test_rows_do_not_compute_blocks_of_other_rows():
  """Row 0 is one sequence, row 1 one in each block, row 2 is empty."""
  length, block = 256, blockwise.BLOCK
  each = (jnp.arange(length, dtype=jnp.int32) // block + 1) * block
  end = jnp.stack([jnp.full_like(each, length), each, jnp.zeros_like(each)])
  q, k, v = _inputs(3, length)
  v = v.at[1:, :block].set(jnp.nan)
  for x in _with_dq(q, k, v, end):
    assert jnp.isnan(x[1:, :block]).all()
    assert not jnp.isnan(x[1:, block:]).any()
    assert not jnp.isnan(x[0]).any()


@pytest.mark.parametrize("size", [None, 7])
@pytest.mark.parametrize("backend", NAMES)
def test_padded_prompts_do_not_affect_each_other(backend, size, monkeypatch):
  """Kernels pad the rows of 150 tokens. With windows of `size`."""
  if size:
    _skip_without_window(backend)
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
  end = jnp.broadcast_to(lengths[:, None], is_real.shape)
  _assert_close(hide(actual), hide(jax.jit(_plain)(*inputs, end, window)))


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
  """Rows of many blocks, other trees in each, over 4 x 2 devices."""
  end = jnp.concatenate([_rows(256), _rows(256)[::-1]])[:8]
  run = functools.partial(attention.attention, backend="xla_by_row")
  inputs = _inputs(8, 256)
  alone = _with_grads(run, *inputs, end)
  mesh = sharding.make_mesh(4, 2)
  with jax.set_mesh(mesh):
    rows = lambda x: jax.device_put(x, sharding.sharding(mesh, "batch", None))
    heads = sharding.sharding(mesh, "batch", None, "heads", None)
    inputs = [jax.device_put(x, heads) for x in inputs]
    spread = _with_grads(run, *inputs, rows(end))
  _assert_close(spread, alone)


# name, platform, row_length, group_size, head_dim -> backend
CHOSEN = {
  ("auto", "cpu", 1024, 8, 128): "xla_by_row",
  ("xla", "cpu", 1024, 8, 128): "xla_by_row",
  ("auto", "gpu", 1024, 8, 128): "tokamax",
  ("auto", "gpu", 192, 65, 256): "tokamax",
  ("auto", "gpu", 2**14, 8, 128): "tokamax",
  ("auto", "gpu", 1000, 8, 128): "xla_dense",
  ("auto", "gpu", 2**14 + 64, 8, 128): "xla",
  ("xla", "gpu", 1024, 8, 128): "xla_dense",
  ("xla", "gpu", 8192, 8, 128): "xla",
  ("xla", "tpu", 1024, 8, 128): "xla",
  ("auto", "tpu", 1024, 8, 128): "splash",
  ("auto", "tpu", 1024, 8, 96): "splash",
  ("auto", "tpu", 1000, 8, 128): "xla",
  ("auto", "tpu", 1024, 65, 128): "xla",
  ("splash", "tpu", 1024, 64, 128): "splash",
  ("tokamax", "gpu", 1024, 8, 128): "tokamax",
  ("splash", "cpu", 1024, 8, 128): "it needs a TPU, not a CPU",
  ("tokamax", "tpu", 1024, 8, 128): "it needs a GPU, not a TPU",
  ("splash", "tpu", 1000, 8, 128): "row_length is 1000 and no multiple of 128",
  ("splash", "tpu", 1024, 65, 128): "group_size is 65, above 64",
  ("tokamax", "gpu", 1000, 8, 128): "row_length is 1000 and no multiple of 64",
  ("tokamax", "gpu", 2**15, 8, 128): "row_length is 32768, above 16384",
}


@pytest.fixture(params=[True, False], ids=["tokamax", "no tokamax"])
def is_installed(request, monkeypatch):
  """True if tokamax seems to be installed."""
  find = lambda name: name if request.param else None
  monkeypatch.setattr(importlib.util, "find_spec", find)
  return request.param


@pytest.mark.parametrize("case", CHOSEN, ids=str)
def test_backend_suits_the_platform_and_the_rows(case, is_installed):
  """In bfloat16."""
  shapes = attention.Shapes(*case[1:], dtype="bfloat16")
  choose = functools.partial(attention.choose_backend, case[0], shapes)
  chosen = CHOSEN[case]
  if not is_installed and chosen == "tokamax":
    chosen = "xla_dense" if case[2] <= 4096 else "xla"
    if case[0] == "tokamax":
      chosen = "tokamax is not installed"
  if chosen in BACKENDS:
    assert choose() == chosen
    return
  where = f"config.model.attention={case[0]} cannot run: .*"
  with pytest.raises(UserError, match=f"{where}{chosen}.*; set it to auto"):
    choose()


@pytest.mark.parametrize(
  ("platform", "changes", "reason"),
  [
    ("tpu", {"has_window": True}, "the model has a window shorter than"),
    ("gpu", {"has_window": True}, ""),
    ("gpu", {"dtype": "float32"}, "tokamax needs bfloat16 or float16, not"),
    ("gpu", {"capability": 8.0}, "compute capability 9 or 10, not 8.0"),
    ("gpu", {"capability": 12.0}, "compute capability 9 or 10, not 12.0"),
    ("gpu", {"capability": 10.3}, ""),
    ("gpu", {"capability": 10.0, "head_dim": 256}, "256 numbers, above 128"),
    ("gpu", {"capability": 9.0, "head_dim": 256}, ""),
  ],
)
@pytest.mark.parametrize("is_installed", [True], indirect=True)
def test_a_kernel_that_cannot_run_is_not_chosen(
  is_installed, platform, changes, reason
):
  shapes = attention.Shapes(platform, 1024, 8, 128, dtype="bfloat16")
  shapes = shapes._replace(**changes)
  actual = attention.obstacle(shapes)
  assert reason in actual and bool(reason) == bool(actual)
  backend = attention.choose_backend("auto", shapes)
  assert (backend in attention.KERNELS) == (not reason)


def test_masks_of_the_longest_rows_take_256_mib():
  end = jax.ShapeDtypeStruct((1, masked.LONGEST), jnp.int32)
  mask = jax.eval_shape(masked._mask, end, None)
  assert mask.size * mask.dtype.itemsize == 2**28
