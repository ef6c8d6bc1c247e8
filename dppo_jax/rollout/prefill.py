"""The caches of a step's prompts, each read once."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from dppo_jax import sharding
from dppo_jax.models import kv_cache, transformer
from dppo_jax.records import PromptBatch
from dppo_jax.rollout.decode import together


def batch_size(prompt_length: int) -> int:
  """Returns how many prompts prefill together on a device.

  They are at most 32, and at most 8,192 tokens unless one prompt is longer.
  """
  return max(1, min(32, 8192 // prompt_length))


def prefill_prompts(
  params: transformer.Params,
  model_config: transformer.ModelConfig,
  prompts: PromptBatch,
  queue: Int[Array, "N"],
  num_kept: Int[Array, ""],
  prefill_batch: int,
  sizes: list[int],
) -> kv_cache.KVCache:
  """Returns caches of the kept prompts in queue order; the others stay zero.

  Args:
    queue: numbers of the prompts, those that were kept first.
    sizes: positions of each part of the cache that decoding takes.
  """
  num_prompts, longest = prompts.tokens.shape
  chunk = sharding.largest_divisor(num_prompts, prefill_batch)
  sizes = kv_cache.prompt_part_sizes(sizes, longest)
  paddings = kv_cache.prompt_paddings(longest)
  in_step = transformer.gathers_layers(model_config)

  def at_length(padded, rows):
    return transformer.prefill(
      params,
      model_config,
      prompts.tokens[rows, :padded],
      prompts.lengths[rows],
      sizes,
    )

  def prefill_chunk(i, cache):
    rows = jax.lax.dynamic_slice(queue, (i * chunk,), (chunk,))
    needed = together(prompts.lengths[rows].max(), in_step)
    new = jax.lax.switch(
      (needed > jnp.array(paddings[:-1], jnp.int32)).sum(),
      [functools.partial(at_length, padded) for padded in paddings],
      rows,
    )
    return kv_cache.put_slots(cache, new, i * chunk)

  empty = kv_cache.init(model_config, num_prompts, sizes)
  num_chunks = together((num_kept + chunk - 1) // chunk, in_step)
  return jax.lax.fori_loop(0, num_chunks, prefill_chunk, empty)
