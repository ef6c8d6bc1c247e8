r"""Times parts of a step of SmolLM2-135M-Instruct against matrix products.

  taskset -c 0 python -m experiments.15_real_model.floors

One micro-batch is `rows` x 256 tokens, three quarters of them trained. The
floor of its gradient is the time of its matrix products at the rate of a large
one. The floor of a decode step is the time of the products of a token in each
slot with all weights, without attention. `product` is the inner product of two
trees of the size of the weights, which measures the gradient noise. All seconds
are CPU seconds of one core.
"""

from collections.abc import Callable
import functools
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dppo_jax import rollout
from dppo_jax.analysis import tables
from dppo_jax.models import hf, lm_head, transformer
from dppo_jax.records import PromptBatch

from . import fetch

LENGTH, REPEATS = 256, 5
DECODED = 8, 40  # tokens of the completions that a decode step is timed with
NEEDED = 0.75


def seconds(function: Callable, *args) -> float:
  """Returns the median time of a call, after a first one to compile."""
  function = jax.jit(function)
  jax.block_until_ready(function(*args))
  times = []
  for _ in range(REPEATS):
    start = time.process_time()
    jax.block_until_ready(function(*args))
    times.append(time.process_time() - start)
  return statistics.median(times)


def matmul_rate(size: int = 2048) -> float:
  """Returns float32 operations a second of a square product."""
  x = jax.random.normal(jax.random.key(0), (size, size))
  return 2 * size**3 / seconds(jnp.matmul, x, x)


def gradient(rows: int, remat: str, dtype: str) -> tuple[float, int]:
  """Returns seconds of a micro-batch's gradient, and its operations."""
  params, config = hf.load(str(fetch.fetch("smollm2")), dtype, remat)
  rng = np.random.default_rng(0)
  shape = rows, LENGTH
  tokens = jnp.array(rng.integers(100, 40_000, shape), jnp.int32)
  positions = jnp.broadcast_to(jnp.arange(LENGTH, dtype=jnp.int32) % 64, shape)
  end = jnp.broadcast_to(
    jnp.arange(LENGTH, dtype=jnp.int32) // 32 * 32 + 32, shape
  )
  is_needed = jnp.array(rng.random(shape) < NEEDED)

  def loss(params):
    hidden = transformer.forward(params, config, tokens, positions, end)
    head = transformer.head(params, config).astype(hidden.dtype)
    return lm_head.logprobs_and_entropy(
      hidden, head, tokens, is_needed, 1.0, lm_head.LOGIT_CHUNK
    )[0].sum()

  embed = params["embed"].size
  body = sum(x.size for x in jax.tree.leaves(params)) - embed
  passes = 6 if remat == "none" else 8  # recomputation is one more forward
  operations = tokens.size * (passes * body + 6 * NEEDED * embed)
  return seconds(jax.grad(loss), params), int(operations)


def products(params, slots: int) -> float:
  """Returns seconds of a token's matrix products in each slot, a layer each."""
  embed = params["embed"].shape[1]
  weights = [x for x in jax.tree.leaves(params["layers"]) if x.ndim > 2]
  shape = lambda x: (
    (len(x), -1, embed) if x.shape[-1] == embed else (*x.shape[:2], -1)
  )
  weights = [x.reshape(shape(x)) for x in weights]

  def run(weights, head):
    def layer(total, weights):
      for w in weights:
        x = jnp.full((slots, w.shape[0]), 1 + 1e-9 * total)
        total += (x @ w).sum()
      return total, None

    total, _ = jax.lax.scan(layer, jnp.float32(0), weights)
    return (jnp.full((slots, embed), total) @ head.T).sum()

  return seconds(run, weights, params["embed"])


def decode_step(params, model, slots: int) -> float:
  """Returns seconds of a decode step, from rollouts of two lengths."""
  prompts = PromptBatch(
    ids=np.arange(slots, dtype=np.int32),
    tokens=np.full((slots, 48), 100, np.int32),
    lengths=np.full(slots, 48, np.int32),
  )
  spent = [
    seconds(
      functools.partial(
        rollout.sample,
        model_config=model,
        group_size=1,
        num_slots=slots,
        max_tokens=tokens,
        stop_ids=(-1,),
        prompts=prompts,
        rng=jax.random.key(0),
      ),
      params,
    )
    for tokens in DECODED
  ]
  return (spent[1] - spent[0]) / (DECODED[1] - DECODED[0])


def main() -> None:
  rate = matmul_rate()
  print(f"matrix product of 2048: {rate / 1e9:.0f} GFLOPS\n")
  head = ("tokens", "recomputed", "dtype", "seconds", "floor", "ratio")
  lines = []
  for rows, remat, dtype in (
    (1, "layers", "float32"),
    (2, "layers", "float32"),
    (2, "none", "float32"),
    (4, "layers", "float32"),
    (2, "layers", "bfloat16"),
  ):
    spent, operations = gradient(rows, remat, dtype)
    floor = operations / rate
    row = (rows * LENGTH, remat, dtype, f"{spent:.2f}", f"{floor:.2f}")
    lines.append((*row, f"{spent / floor:.2f}"))
  print(tables.markdown(head, lines), "\n")
  params, model = hf.load(str(fetch.fetch("smollm2")))
  head, lines = ("slots", "seconds of a decode step", "floor", "ratio"), []
  for slots in (64, 16, 4):
    spent, floor = decode_step(params, model, slots), products(params, slots)
    row = f"{spent:.3f}", f"{floor:.3f}", f"{spent / floor:.2f}"
    lines.append((slots, *row))
  print(tables.markdown(head, lines), "\n")
  other = jax.tree.map(lambda x: x + 1, params)
  product = seconds(optax.tree.vdot, params, other)
  total = seconds(functools.partial(jax.tree.map, jnp.add), params, other)
  print(f"product {product:.3f} s, sum of two trees {total:.3f} s")


if __name__ == "__main__":
  main()
