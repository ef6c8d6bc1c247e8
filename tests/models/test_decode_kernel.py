"""The decode kernels for GPUs and TPUs, emulated, against plain attention."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dppo_jax import sharding
from dppo_jax.models.attention import (
  decode_kernel,
  decode_kernel_gpu,
  decode_kernel_tpu,
)

pytestmark = pytest.mark.usefixtures("gpu_kernels")

LAYER = 1
COUNTS = [0, 5, 128, 191]  # own tokens of each slot
SHARED = [0, 64, 97, 128]  # prompt tokens of each slot
ROWS = [0, 1, 1, 0]  # prompts
OWN = [4, 0, 1, 3]  # slots of the cache, of 5


def _inputs(heads, kv_heads, dtype=jnp.float32, num=1, dim=32):
  shapes = {
    "q": (4, num, heads, dim),
    "k": (4, num, kv_heads, dim),
    "v": (4, num, kv_heads, dim),
    "cache": (2, 2, 5, kv_heads, 192, dim),
    "prompts": (2, 2, 2, kv_heads, 128, dim),
  }
  keys = jax.random.split(jax.random.key(0), len(shapes))
  values = [
    jax.random.normal(key, shape).astype(dtype)
    for key, shape in zip(keys, shapes.values(), strict=True)
  ]
  return *values[:3], tuple(values[3]), tuple(values[4])


def _run(inputs, window=None):
  positions = jnp.array(SHARED, jnp.int32) + jnp.array(COUNTS, jnp.int32)
  rows = jnp.array(OWN), jnp.array(ROWS)
  where = jnp.int32(LAYER), *rows, positions, jnp.array(COUNTS)
  where = *where, window and positions - window + 1
  is_tpu = inputs[0].shape[-1] % 128 == 0
  kernel = functools.partial(decode_kernel.attend, is_tpu=is_tpu)
  return jax.jit(kernel)(*inputs, *where)


def _plain(q, k, v, cache, prompts, window=None):
  """Attends with each token to the prompt and to what precedes it."""
  outs = np.zeros(q.shape, np.float32)
  for slot, token in np.ndindex(q.shape[:2]):
    count, shared, row = COUNTS[slot], SHARED[slot], ROWS[slot]
    keys, values = (
      np.concatenate(
        [
          p[LAYER, row, :, :shared],
          c[LAYER, OWN[slot], :, :count],
          x[slot, : token + 1].swapaxes(0, 1),
        ],
        axis=1,
      )[:, -(window or 1000) :]
      for p, c, x in zip(prompts, cache, (k, v), strict=True)
    )
    queries = q[slot, token].reshape(keys.shape[0], -1, q.shape[-1])
    logits = np.einsum("kgd,ksd->kgs", queries, keys) * q.shape[-1] ** -0.5
    out = np.einsum("kgs,ksd->kgd", jax.nn.softmax(logits), values)
    outs[slot, token] = out.reshape(-1, q.shape[-1])
  return outs


@pytest.fixture(params=["divided", "undivided", "tpu"])
def dim(request, monkeypatch):
  """The size of heads, which determines the kernel.

  That for GPUs has several splits of prompt and completion, or one program;
  that for TPUs has several blocks.
  """
  monkeypatch.setattr(decode_kernel_gpu, "_MIN_SPLIT", 64)
  monkeypatch.setattr(decode_kernel_tpu, "_MOST", 64)
  if request.param == "undivided":
    monkeypatch.setattr(decode_kernel_gpu, "_ENOUGH", 1)
  return 128 if request.param == "tpu" else 32


@pytest.mark.parametrize("num", [1, 2, 8])
@pytest.mark.parametrize("heads, kv_heads", [(4, 2), (16, 1), (14, 2)])
def test_output_is_attention_over_the_prompt_and_the_own_tokens(
  dim, heads, kv_heads, num
):
  inputs = _inputs(heads, kv_heads, num=num, dim=dim)
  out, _ = _run(inputs)
  np.testing.assert_allclose(out, _plain(*inputs), atol=1e-6)


@pytest.mark.parametrize(
  ("window", "num"), [(3, 8), (64, 1), (100, 8), (260, 1)]
)
def test_a_window_hides_older_positions(dim, window, num):
  """One window is shorter than the new tokens."""
  inputs = _inputs(4, 2, num=num, dim=dim)
  out, _ = _run(inputs, window)
  np.testing.assert_allclose(out, _plain(*inputs, window), atol=1e-6)


@pytest.mark.parametrize("num", [1, 3])
def test_only_the_new_positions_of_each_slot_are_written(dim, num):
  """One slot is at the last position of its cache."""
  inputs = _inputs(4, 2, num=num, dim=dim)
  _, written = _run(inputs)
  for new, old, x in zip(written, inputs[3], inputs[1:3], strict=True):
    expected = np.array(old)
    for slot, i in np.ndindex(4, num):
      if COUNTS[slot] + i < expected.shape[3]:
        expected[LAYER, OWN[slot], :, COUNTS[slot] + i] = x[slot, i]
    np.testing.assert_array_equal(new, expected)


def test_error_in_bfloat16_is_that_of_its_rounding(dim):
  """Probabilities are rounded to bfloat16; sums are float32."""
  inputs = _inputs(4, 2, jnp.bfloat16, dim=dim)
  exact = jax.tree.map(lambda x: x.astype(jnp.float32), inputs)
  out, _ = _run(inputs)
  np.testing.assert_allclose(out, _plain(*exact), atol=2**-7)


def test_heads_are_divided_by_the_model_axis(dim):
  inputs = _inputs(8, 4, dim=dim)
  alone = _run(inputs)
  with jax.set_mesh(sharding.make_mesh(2, 4)):
    spread = _run(inputs)
  jax.tree.map(
    functools.partial(np.testing.assert_allclose, atol=1e-6), spread, alone
  )
