"""Decode slots: unfinished completions, and the steps that extend them."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dppo_jax import sharding
from dppo_jax.models import kv_cache, parameters, transformer
from dppo_jax.models.config import ModelConfig
from dppo_jax.records import PromptBatch, Rollout
from dppo_jax.rollout.sampling import Sampling, sample_token


class Slots(NamedTuple):
  """Unfinished completions, one in each slot."""

  item: Int[Array, "B"]  # number of the completion; QG if idle
  token: Int[Array, "B"]  # newest token, which the model has not read yet
  position: Int[Array, "B"]  # position of this token
  num_sampled: Int[Array, "B"]  # tokens sampled so far
  rank: Int[Array, "B"]  # of its prompt in the queue
  cache_slot: Int[Array, "B"]  # its slot in the cache


class DecodeState(NamedTuple):
  """State of the decode loop, on one shard of the batch."""

  slots: Slots
  cache: kv_cache.KVCache  # holds the tokens that the model has read
  output: Int[Array, "QG T 2"]  # tokens, or -1, and bits of logprobs
  uniform: Float[Array, "QG T"]  # random number of each token
  num_wanted: Int[Array, ""]  # completions of kept prompts
  num_taken: Int[Array, ""]  # completions that have been given a slot
  slot_steps: Int[Array, ""]  # so far, of all slots


class Queue(NamedTuple):
  """Prompts whose completions wait for a slot."""

  prompts: PromptBatch  # all prompts of the shard
  order: Int[Array, "Q"]  # numbers of the prompts, kept ones first
  cache: kv_cache.KVCache  # holds the prompts, in this order
  group_size: int  # G
  shares_prompts: bool  # slots read this cache, and copy nothing

  def find(self, number: Int[Array, "B"]) -> tuple[Array, Array, Array]:
    """Returns rank, item and prompt of the completions of these numbers."""
    rank, member = number // self.group_size, number % self.group_size
    prompt = self.order[rank]
    return rank, prompt * self.group_size + member, prompt


def slot_schedule(num_slots: int) -> list[int]:
  """Returns the slots of each phase of the decode loop, descending.

  Each phase is compiled; none changes a token. Below a few slots the time of a
  step no longer falls, so the schedule stops there.

  >>> from dppo_jax.rollout import decode
  >>> decode.slot_schedule(64)
  [64, 32, 16, 8]
  """
  sizes = [num_slots // divisor for divisor in (2, 4, 8)]
  return [num_slots, *(size for size in sizes if size >= 4)]


def init_decode_state(
  model_config: ModelConfig,
  uniform: Float[Array, "QG T"],
  num_wanted: Int[Array, ""],
  num_slots: int,
  part_sizes: list[int],
) -> DecodeState:
  """Returns idle slots and empty completions."""
  num_items, zeros = len(uniform), jnp.zeros(num_slots, jnp.int32)
  slots = jnp.arange(num_slots, dtype=jnp.int32)
  return DecodeState(
    Slots(zeros + num_items, zeros, zeros, zeros, zeros, slots),
    kv_cache.init(model_config, num_slots, part_sizes),
    jnp.broadcast_to(jnp.array([-1, 0], jnp.int32), (*uniform.shape, 2)),
    uniform,
    num_wanted,
    num_taken=jnp.int32(0),
    slot_steps=jnp.int32(0),
  )


def refill(state: DecodeState, queue: Queue) -> DecodeState:
  """Gives the next completions to the idle slots.

  Unless slots share the cache of the prompts, a loop copies the cache of each
  new completion's prompt.
  """
  slots, index = state.slots, jnp.arange(state.slots.item.size, dtype=jnp.int32)
  is_idle = slots.item == len(state.uniform)
  num_before = (is_idle & (index < index[:, None])).sum(1, dtype=jnp.int32)
  number = state.num_taken + num_before
  is_new = is_idle & (number < state.num_wanted)
  num_new = is_new.sum(dtype=jnp.int32)
  rank, item, prompt = queue.find(number)
  # The last prompt token is read again: its successor is sampled in the step
  # that all other slots take.
  last = queue.prompts.lengths[prompt] - 1

  def copy_prompt(i, cache):
    slot = jnp.argmax(is_new & (num_before == i))
    return kv_cache.copy_slot(cache, slot, queue.cache, rank[slot])

  cache = state.cache
  if not queue.shares_prompts:
    cache = jax.lax.fori_loop(0, num_new, copy_prompt, cache)
  new = Slots(
    item=item,
    token=queue.prompts.tokens[prompt, last],
    position=last,
    num_sampled=jnp.zeros_like(last),
    rank=rank,
    cache_slot=slots.cache_slot,
  )
  return state._replace(
    slots=jax.tree.map(lambda x, old: jnp.where(is_new, x, old), new, slots),
    cache=cache,
    num_taken=state.num_taken + num_new,
  )


def compact_slots(
  state: DecodeState, size: int, moves_cache: bool
) -> DecodeState:
  """Keeps `size` of the slots, the busy ones among them.

  Args:
    moves_cache: the cache is copied to one of `size` slots.
  """
  is_idle = state.slots.item == len(state.uniform)
  chosen = jnp.argsort(is_idle, stable=True)[:size]
  if moves_cache:
    state = state._replace(cache=kv_cache.take_slots(state.cache, chosen))
  return state._replace(slots=jax.tree.map(lambda x: x[chosen], state.slots))


def decode_until(
  limit: int, step: Callable[[DecodeState], DecodeState], state: DecodeState
) -> DecodeState:
  """Repeats `step` until at most `limit` completions are unfinished."""

  def is_unfinished(state):
    is_live = state.slots.item < len(state.uniform)
    waiting = state.num_wanted - state.num_taken
    return waiting + is_live.sum(dtype=jnp.int32) > limit

  with jax.named_scope(f"decode_{state.slots.item.size}"):
    return jax.lax.while_loop(is_unfinished, step, state)


def decode_step(
  params: parameters.Params,
  model_config: ModelConfig,
  sampling: Sampling,
  queue: Queue,
  state: DecodeState,
) -> DecodeState:
  """Samples the next token of every slot, on one shard."""
  slots = state.slots
  shared = None
  if queue.shares_prompts:
    shared = kv_cache.SharedPrompts(
      queue.cache,
      slot=slots.cache_slot,
      rank=slots.rank,
      num_following=slots.num_sampled,
    )
  hidden, cache = transformer.decode(
    params, model_config, slots.token, slots.position, state.cache, shared
  )
  # Gathered over the model axis, before sampling: other shards of the batch may
  # take fewer steps, so that no collective may wait for them.
  logits = transformer.logits(params, model_config, hidden)
  logits = sharding.constrain(logits, "batch", None)
  token, logprob = sample_token(
    logits,
    state.uniform[slots.item, slots.num_sampled],
    sampling.temperature,
    sampling.top_k,
    sampling.top_p,
  )
  bits = jax.lax.bitcast_convert_type(logprob, jnp.int32)
  output = state.output.at[slots.item, slots.num_sampled].set(
    jnp.stack([token, bits], axis=-1), mode="drop"
  )
  stop_ids = jnp.asarray(sampling.stop_ids, jnp.int32)
  is_end = (token[:, None] == stop_ids).any(-1)
  is_end |= slots.num_sampled + 1 == sampling.max_tokens
  return _advance(state._replace(output=output, cache=cache), token, is_end)


def _advance(
  state: DecodeState, token: Int[Array, "B"], is_end: Bool[Array, "B"]
) -> DecodeState:
  """Moves slots to their new token; those at their end become idle."""
  slots, num_items = state.slots, len(state.uniform)
  is_live = slots.item < num_items
  # Idle slots sit at position 0 so that they do not widen KV reads.
  move = lambda x: jnp.where(is_live & ~is_end, x + 1, 0)
  return state._replace(
    slots=slots._replace(
      item=jnp.where(is_end, num_items, slots.item),
      token=token,
      position=move(slots.position),
      num_sampled=move(slots.num_sampled),
    ),
    slot_steps=state.slot_steps + is_live.size,
  )


def completions(
  state: DecodeState, prompt_ids: Int[Array, "Q"], stop_ids: tuple[int, ...]
) -> Rollout:
  """Returns the sampled completions, without the choice of prompts."""
  tokens, bits = state.output[..., 0], state.output[..., 1]
  lengths = (tokens >= 0).sum(-1, dtype=jnp.int32)
  last = jnp.take_along_axis(tokens, lengths[:, None] - 1, 1)
  by_group = lambda x: x.reshape(len(prompt_ids), -1, *x.shape[1:])
  return Rollout(
    prompt_ids,
    tokens=by_group(jnp.maximum(tokens, 0)),
    logprobs=by_group(jax.lax.bitcast_convert_type(bits, jnp.float32)),
    lengths=by_group(lengths),
    is_stopped=by_group((last == jnp.asarray(stop_ids, jnp.int32)).any(-1)),
  )
