"""Key-value caches of prompts; each prompt is read once."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from dppo_jax import sharding
from dppo_jax.models import kv_cache, parameters, transformer
from dppo_jax.records import PromptBatch
from dppo_jax.rollout.decode import max_over_weight_shards


def batch_size(prompt_length: int) -> int:
  """Returns the prompts that a device prefills together, up to 8,192 tokens."""
  return max(1, min(32, 8192 // prompt_length))


def prefill_prompts(
  params: transformer.Params,
  model_config: transformer.ModelConfig,
  prompts: PromptBatch,
  order: Int[Array, "N"],
  num_kept: Int[Array, ""],
  prefill_batch: int,
  part_sizes: list[int],
) -> kv_cache.KVCache:
  """Returns the caches of the kept prompts, zeros for the others, in `order`.

  Args:
    order: numbers of the prompts, kept ones first.
    prefill_batch: prompts that are read at once.
    part_sizes: positions of each part of the cache for decoding.
  """
  num_prompts, longest = prompts.tokens.shape
  chunk = sharding.largest_divisor(num_prompts, prefill_batch)
  part_sizes = kv_cache.prompt_part_sizes(part_sizes, longest)
  paddings = kv_cache.prompt_paddings(longest)
  lockstep = parameters.gathers_layers(model_config)

  def prefill_padded(padded, rows):
    tokens, lengths = prompts.tokens[rows, :padded], prompts.lengths[rows]
    return transformer.prefill(
      params, model_config, tokens, lengths, part_sizes
    )

  def prefill_chunk(i, cache):
    rows = jax.lax.dynamic_slice(order, (i * chunk,), (chunk,))
    length = max_over_weight_shards(prompts.lengths[rows].max(), lockstep)
    chunk_cache = jax.lax.switch(
      (length > jnp.array(paddings[:-1], jnp.int32)).sum(),
      [functools.partial(prefill_padded, padded) for padded in paddings],
      rows,
    )
    return kv_cache.put_slots(cache, chunk_cache, i * chunk)

  empty = kv_cache.init(model_config, num_prompts, part_sizes)
  num_chunks = max_over_weight_shards((num_kept + chunk - 1) // chunk, lockstep)
  return jax.lax.fori_loop(0, num_chunks, prefill_chunk, empty)
