"""Decoding alone: tokens/s of full slots, and what memory could give."""

from collections.abc import Iterator
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from dppo_jax.models import kv_cache, parameters, transformer
from dppo_jax.models.config import ModelConfig

from ..common import machine, phases
from ..common import work as works
from . import checks

STEPS = 64  # in one compiled loop


def rows(model: str) -> Iterator[dict[str, Any]]:
  """Slots that all hold a context of 512 tokens, and 64 tokens more for each.

  Bytes are those that a step cannot do without: the weights once, and the
  cache of every slot.
  """
  yard = machine.yardstick(5)["bytes"]
  for slots, context in ((64, 512), (256, 512), (256, 2048)):
    config = works.WORKS[model].model
    config = dataclasses.replace(config, dtype="bfloat16")
    backend = checks.choose_backend(config, 1024, 8)
    config = dataclasses.replace(config, attention=backend)
    compiled, args = _compiled(config, slots, context)
    seconds = machine.timed(lambda f=compiled, a=args: f(*a), 5)
    step = seconds.median / STEPS
    needed = _bytes(config, slots, context + STEPS / 2)
    used = compiled.memory_analysis()
    yield {
      "name": "decode",
      "model": model,
      "slots": slots,
      "context": context,
      "seconds_of_a_step": step,
      "spread": [seconds.least / STEPS, seconds.most / STEPS],
      "tokens_per_second": slots / step,
      "bytes_of_a_step": needed,
      "share_of_bandwidth": needed / step / yard,
      "bandwidth": yard,
      # Of all steps, whose number the compiler knows, and what precedes them.
      "launches": {
        name: [x / STEPS for x in counts]
        for name, counts in phases.launches(compiled).items()
      },
      "temporary_bytes": used.temp_size_in_bytes if used else 0,
    }


def _compiled(config: ModelConfig, slots: int, context: int):
  sizes, _ = kv_cache.slot_and_prompt_sizes(config, 1, context + STEPS)
  # Made as they are read: master weights of the larger models would not fit
  # next to a cache.
  make = lambda key: parameters.to_inference_params(
    parameters.init(config, key), config
  )
  params = jax.jit(make)(jax.random.key(0))

  def run(params, tokens):
    def one(i, carry):
      tokens, cache = carry
      positions = jnp.full((slots,), context, jnp.int32) + i
      shared = None
      if config.shares_prompts:  # none is: all tokens are the slot's
        cache_slots = jnp.arange(slots, dtype=jnp.int32)
        shared = kv_cache.SharedPrompts(
          empty, cache_slots, 0 * cache_slots, positions
        )
      hidden, cache = transformer.decode(
        params, config, tokens, positions, cache, shared
      )
      logits = transformer.logits(params, config, hidden)
      return logits.argmax(axis=-1).astype(jnp.int32), cache

    cache = kv_cache.init(config, slots, sizes)
    empty = kv_cache.init(config, 1, [64])
    return jax.lax.fori_loop(0, STEPS, one, (tokens, cache))[0]

  tokens = jnp.arange(slots, dtype=jnp.int32)
  compiled = jax.jit(run).lower(params, tokens).compile()
  return compiled, (params, tokens)


@functools.cache
def _bytes(config: ModelConfig, slots: int, context: float) -> float:
  size = jnp.dtype(config.dtype).itemsize
  weights = parameters.num_parameters(config)
  if not config.is_tied:  # of the embedding a step reads a few rows
    weights -= config.vocab * config.embed
  per_token = 2 * config.layers * config.kv_heads * config.head_dim
  return float(size * (weights + slots * context * per_token))
