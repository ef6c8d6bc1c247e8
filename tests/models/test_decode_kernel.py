"""The decode kernel for TPUs, emulated, against plain attention."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

from dppo_jax import sharding
from dppo_jax.models.attention import decode_kernel

pytestmark = pytest.mark.usefixtures("tpu_kernels")

LAYER = 1
COUNTS = [0, 5, 128, 191]  # own tokens of each slot
SHARED = [0, 64, 97, 128]  # prompt tokens of each slot
ROWS = [0, 1, 1, 0]  # prompts
OWN = [4, 0, 1, 3]  # slots of the cache, of 5


def _inputs(heads, kv_heads, dtype=jnp.float32, dim=128):
  shapes = {
    "q": (4, heads, dim),
    "k": (4, kv_heads, dim),
    "v": (4, kv_heads, dim),
    "cache": (2, 2, 5, kv_heads, 192, dim),
    "prompts": (2, 2, 2, kv_heads, 128, dim),
  }
  keys = jax.random.split(jax.random.key(0), len(shapes))
  values = [
    jax.random.normal(key, shape).astype(dtype)
    for key, shape in zip(keys, shapes.values(), strict=True)
  ]
  return *values[:3], tuple(values[3]), tuple(values[4])


def _run(inputs):
  positions = jnp.array(SHARED, jnp.int32) + jnp.array(COUNTS, jnp.int32)
  rows = jnp.array(OWN), jnp.array(ROWS)
  where = jnp.int32(LAYER), *rows, positions, jnp.array(COUNTS)
  return jax.jit(decode_kernel.attend)(*inputs, *where)


def _plain(q, k, v, cache, prompts):
  """Attends with each token to the prompt and to what precedes it."""
  outs = np.zeros(q.shape, np.float32)
  for slot in range(len(q)):
    count, shared, row = COUNTS[slot], SHARED[slot], ROWS[slot]
    keys, values = (
      np.concatenate(
        [
          p[LAYER, row, :, :shared],
          c[LAYER, OWN[slot], :, :count],
          x[slot, :, None],
        ],
        axis=1,
      )
      for p, c, x in zip(prompts, cache, (k, v), strict=True)
    )
    queries = q[slot].reshape(keys.shape[0], -1, q.shape[-1])
    logits = np.einsum("kgd,ksd->kgs", queries, keys) * q.shape[-1] ** -0.5
    out = np.einsum("kgs,ksd->kgd", scipy.special.softmax(logits, -1), values)
    outs[slot] = out.reshape(-1, q.shape[-1])
  return outs


@pytest.fixture(autouse=True)
def several_blocks(monkeypatch):
  monkeypatch.setattr(decode_kernel, "_MOST", 64)


@pytest.mark.parametrize("heads, kv_heads", [(4, 2), (16, 1), (14, 2)])
def test_output_is_attention_over_the_prompt_and_the_own_tokens(
  heads, kv_heads
):
  inputs = _inputs(heads, kv_heads)
  out, _ = _run(inputs)
  np.testing.assert_allclose(out, _plain(*inputs), atol=1e-6)


def test_only_the_new_position_of_each_slot_is_written():
  """One slot is at the last position of its cache."""
  inputs = _inputs(4, 2)
  _, written = _run(inputs)
  for new, old, x in zip(written, inputs[3], inputs[1:3], strict=True):
    expected = np.array(old)
    for slot in range(4):
      expected[LAYER, OWN[slot], :, COUNTS[slot]] = x[slot]
    np.testing.assert_array_equal(new, expected)


def test_error_in_bfloat16_is_that_of_its_rounding():
  """Probabilities are rounded to bfloat16; sums are float32."""
  inputs = _inputs(4, 2, jnp.bfloat16)
  exact = jax.tree.map(lambda x: x.astype(jnp.float32), inputs)
  out, _ = _run(inputs)
  np.testing.assert_allclose(out, _plain(*exact), atol=2**-7)


def test_heads_are_divided_by_the_model_axis():
  inputs = _inputs(8, 4)
  alone = _run(inputs)
  with jax.set_mesh(sharding.make_mesh(2, 4)):
    spread = _run(inputs)
  jax.tree.map(
    functools.partial(np.testing.assert_allclose, atol=1e-6), spread, alone
  )
