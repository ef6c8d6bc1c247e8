"""Decode slots: completions under way, and one decoding step of them."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dppo_jax import sharding
from dppo_jax.models import kv_cache, transformer
from dppo_jax.rollout.sampling import Sampling, sample_token

# Slots of a last stage: below, a step is hardly any shorter.
_FEWEST_SLOTS = 3
_FEWEST_ON_ACCELERATORS = 16


class Slots(NamedTuple):
  """Completions under way.

  Attributes:
    item: `[B]`, which completion; the number of completions where idle.
    token: `[B]`, the newest token, which the model has not read yet.
    position: `[B]`, that token's position.
    count: `[B]`, tokens sampled so far.
    cache: keys and values of what the model has read.
  """

  item: Int[Array, "B"]
  token: Int[Array, "B"]
  position: Int[Array, "B"]
  count: Int[Array, "B"]
  cache: kv_cache.KVCache


class DecodeOutput(NamedTuple):
  """Completions so far, one row each."""

  tokens: Int[Array, "QG T"]
  logprobs: Float[Array, "QG T"]
  lengths: Int[Array, "QG"]
  is_stopped: Bool[Array, "QG"]


class DecodeState(NamedTuple):
  """A rollout under way, on one shard of the batch.

  Attributes:
    uniform: `[QG, T]`, the random number of each token.
    num_wanted: `[1]`, completions of prompts that were kept.
    num_done: `[1]`, how many of them are complete.
    slot_steps: `[1]`, slots times steps so far.
  """

  slots: Slots
  output: DecodeOutput
  uniform: Float[Array, "QG T"]
  num_wanted: Int[Array, "1"]
  num_done: Int[Array, "1"]
  slot_steps: Int[Array, "1"]


def slot_schedule(num_slots: int, platform: str) -> list[int]:
  """How many slots each stage of the decode loop has, largest first.

  Each stage is compiled, and none changes a token. On a CPU a step takes the
  longer the more slots there are: each stage has a sixth of `num_slots` fewer,
  at most half, and with geometric lengths and four completions per slot 95%
  stay busy. On accelerators a step of few slots is bound by reading weights,
  whatever their number, and a stage takes long to compile: each has a quarter
  of the one before.

  >>> from dppo_jax.rollout import decode
  >>> decode.slot_schedule(64, "cpu")
  [64, 53, 42, 31, 20, 10, 5, 2]
  >>> decode.slot_schedule(64, "tpu")
  [64, 16]

  Args:
    platform: of the devices: cpu, gpu or tpu.
  """
  sizes, fewer = [num_slots], -(-num_slots // 6)
  if platform != "cpu":
    while sizes[-1] // 4 >= _FEWEST_ON_ACCELERATORS:
      sizes.append(sizes[-1] // 4)
    return sizes
  while sizes[-1] > _FEWEST_SLOTS:
    sizes.append(max(sizes[-1] - fewer, sizes[-1] // 2))
  return sizes


def loop(
  is_on: Callable[[Any], Array],
  body: Callable[[Any], Any],
  carry: Any,
  in_step: bool,
) -> Any:
  """`jax.lax.while_loop` on one shard.

  Args:
    in_step: all shards that share weights go on while any of them does.
  """
  if not in_step:
    return jax.lax.while_loop(is_on, body, carry)

  def step(state):
    carry = body(state[0])
    return carry, together(is_on(carry), in_step)

  start = (carry, together(is_on(carry), in_step))
  return jax.lax.while_loop(lambda state: state[1], step, start)[0]


def together(x: Array, in_step: bool) -> Array:
  """The largest `x` of the shards that share weights."""
  if not in_step:
    return x
  axes = sharding.RULES["embed"]
  return jax.lax.pmax(x.astype(jnp.int32), axes).astype(x.dtype)


def more_unfinished_than(limit: int) -> Callable[[DecodeState], Array]:
  """Are more than `limit` completions unfinished, on one shard?"""
  return lambda state: (state.num_wanted - state.num_done > limit)[0]


def decode_step(
  params: transformer.Params,
  model_config: transformer.ModelConfig,
  state: DecodeState,
  sampling: Sampling,
) -> DecodeState:
  """One more token of every slot, on one shard.

  Args:
    params: of `transformer.to_inference_params`.
  """
  slots, output = state.slots, state.output
  num_items = state.uniform.shape[0]
  hidden, cache = transformer.decode(
    params, model_config, slots.token, slots.position, slots.cache
  )
  # Gathered over the model axis before sampling: a collective inside the loop
  # may wait for devices of this shard alone, since others take more steps or
  # fewer.
  logits = sharding.constrain(
    transformer.logits(params, model_config, hidden), "batch", None
  )
  at = (slots.item, slots.count)
  token, logprob = sample_token(
    logits,
    state.uniform[at],
    sampling.temperature,
    sampling.top_k,
    sampling.top_p,
  )
  put = lambda x, value: x.at[at].set(value, mode="drop")
  stop_ids = jnp.asarray(sampling.stop_ids, jnp.int32)
  is_stop = (token[:, None] == stop_ids).any(-1)
  is_live = slots.item < num_items
  is_done = is_live & (is_stop | (slots.count + 1 == sampling.max_tokens))
  return state._replace(
    output=DecodeOutput(
      tokens=put(output.tokens, token),
      logprobs=put(output.logprobs, logprob),
      lengths=output.lengths.at[slots.item].set(slots.count + 1, mode="drop"),
      is_stopped=output.is_stopped.at[slots.item].set(is_stop, mode="drop"),
    ),
    slots=Slots(
      item=jnp.where(is_done, num_items, slots.item),
      token=token,
      # Idle slots sit at position 0 so that they do not widen KV reads.
      position=jnp.where(is_live & ~is_done, slots.position + 1, 0),
      count=jnp.where(is_live, slots.count + 1, 0),
      cache=cache,
    ),
    num_done=state.num_done + is_done.sum(dtype=jnp.int32),
    slot_steps=state.slot_steps + slots.item.shape[0],
  )


def compact_slots(slots: Slots, size: int, idle: int) -> Slots:
  """`size` of the slots, the busy ones among them.

  Args:
    idle: the item number that marks an idle slot.
  """
  chosen = jnp.argsort(slots.item == idle, stable=True)[:size]
  return Slots(
    *(x[chosen] for x in slots[:-1]),
    cache=kv_cache.take_slots(slots.cache, chosen),
  )
