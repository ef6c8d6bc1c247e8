"""Decode slots: completions in the making, and one step of them."""

from collections.abc import Callable
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dppo_jax import sharding
from dppo_jax.models import transformer
from dppo_jax.sampling import Sampling, choose

_FEWEST_SLOTS = 3


class Slots(NamedTuple):
  """Completions in the making.

  Attributes:
    item: `[B]`, which completion; the number of completions where idle.
    token: `[B]`, the newest token, which the model has not read yet.
    position: `[B]`, that token's position.
    count: `[B]`, tokens sampled so far.
    cache: what the model has read.
  """

  item: Int[Array, "B"]
  token: Int[Array, "B"]
  position: Int[Array, "B"]
  count: Int[Array, "B"]
  cache: transformer.Cache


class Written(NamedTuple):
  """Completions as far as they have come, one row each."""

  tokens: Int[Array, "QG T"]
  logprobs: Float[Array, "QG T"]
  lengths: Int[Array, "QG"]
  is_stopped: Bool[Array, "QG"]


class Decoding(NamedTuple):
  """A rollout under way, on each of `S` shards of the data axis.

  Attributes:
    uniform: `[QG, T]`, the random number of each token.
    num_wanted: `[S]`, completions of prompts that were kept.
    num_done: `[S]`, how many of them are complete.
    slot_steps: `[S]`, slots times steps so far.
  """

  slots: Slots | None  # None when all are done
  written: Written
  uniform: Float[Array, "QG T"]
  num_wanted: Int[Array, "S"]
  num_done: Int[Array, "S"]
  slot_steps: Int[Array, "S"]


def slot_sizes(num_slots: int) -> list[int]:
  """How many slots each stage of the decode loop has, largest first.

  A sixth fewer each time, at most half: with lengths that are geometric and
  four completions a slot, 0.95 of them are busy. Each stage is compiled.
  """
  sizes, fewer = [num_slots], -(-num_slots // 6)
  while sizes[-1] > _FEWEST_SLOTS:
    sizes.append(max(sizes[-1] - fewer, sizes[-1] // 2))
  return sizes


def has_more(limit: int) -> Callable[[Decoding], Bool[Array, ""]]:
  """Are more completions left than `limit`, on one shard?"""
  return lambda x: (x.num_wanted - x.num_done > limit)[0]


def step(
  weights: transformer.Params,
  model_config: transformer.ModelConfig,
  decoding: Decoding,
  sampling: Sampling,
) -> Decoding:
  """One more token of every slot, on one shard.

  Args:
    weights: of `transformer.unstack`.
  """
  slots, written = decoding.slots, decoding.written
  num_items = decoding.uniform.shape[0]
  hidden, cache = transformer.decode(
    weights, model_config, slots.token, slots.position, slots.cache
  )
  # Whole on each device: a shard may wait for those of its own prompts
  # alone, since others take more steps or fewer.
  scores = sharding.constrain(
    transformer.logits(weights, model_config, hidden), "batch", None
  )
  at = (slots.item, slots.count)
  token, logprob = choose(
    scores,
    decoding.uniform[at],
    sampling.temperature,
    sampling.top_k,
    sampling.top_p,
  )
  stops = jnp.asarray(sampling.stop_ids, jnp.int32)
  is_stop = (token[:, None] == stops).any(-1)
  is_live = slots.item < num_items
  is_done = is_live & (is_stop | (slots.count + 1 == sampling.max_tokens))
  return decoding._replace(
    written=Written(
      tokens=written.tokens.at[at].set(token, mode="drop"),
      logprobs=written.logprobs.at[at].set(logprob, mode="drop"),
      lengths=written.lengths.at[slots.item].set(slots.count + 1, mode="drop"),
      is_stopped=written.is_stopped.at[slots.item].set(is_stop, mode="drop"),
    ),
    slots=Slots(
      item=jnp.where(is_done, num_items, slots.item),
      token=token,
      # An idle slot stays at cell 0, so that it does not lengthen the reads.
      position=jnp.where(is_live & ~is_done, slots.position + 1, 0),
      count=jnp.where(is_live, slots.count + 1, 0),
      cache=cache,
    ),
    num_done=decoding.num_done + is_done.sum(dtype=jnp.int32),
    slot_steps=decoding.slot_steps + slots.item.shape[0],
  )


def gather_busy(slots: Slots, size: int, idle: int) -> Slots:
  """`size` of the slots, those at work among them."""
  chosen = jnp.argsort(slots.item == idle, stable=True)[:size]

  def move(x):  # as a matrix of pieces, which compiles in a third of the time
    pieces = x.reshape(*x.shape[:2], math.prod(x.shape[2:]))
    return pieces[:, chosen].reshape(len(x), size, *x.shape[2:])

  return Slots(
    *(x[chosen] for x in slots[:-1]), cache=jax.tree.map(move, slots.cache)
  )
