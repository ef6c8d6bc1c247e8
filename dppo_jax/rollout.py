"""Sampling completions: continuous batching as one pure function.

Every prompt is prefilled once. A fixed number of decode slots then draws from
the completions that wait: a slot whose sequence stops takes the next one
inside the same compiled loop, starting from a copy of its prompt's cache.
When fewer completions are left than slots, the slots still at work move
together and the loop goes on with fewer: that is a second part, during which
the completions of the first can be graded.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from dppo_jax import buckets, keys
from dppo_jax.decoding import (
  Decoding,
  Slots,
  Written,
  gather_busy,
  has_more,
  slot_sizes,
  step,
)
from dppo_jax.models import transformer
from dppo_jax.records import PromptBatch, Rollout, Selection
from dppo_jax.sampling import Sampling

# Cells that prompts are padded to, or its double, ...; a cache's first part has
# as many or more.
_SHORTEST = 128


# Which axis of each array the shards divide; the model axis is the compiler's.
_SLOT = jax.P("data")
_SHARDS = Decoding(
  Slots(_SLOT, _SLOT, _SLOT, _SLOT, cache=jax.P(None, "data")), *(_SLOT,) * 5
)


def sample(
  params: transformer.Params,
  model_config: transformer.ModelConfig,
  prompts: PromptBatch,
  draw: keys.Draw,
  *,
  group_size: int,
  num_slots: int,
  prefill_prompts: int = 16,
  kept: Selection | None = None,
  **sampling,
) -> Rollout:
  """`group_size` completions of each prompt that was kept.

  A completion's randomness comes from its prompt's id, its number in the group
  and the token's index: its tokens depend neither on its slot or neighbours,
  nor on which other prompts were kept, nor on the number of devices.

  Under a mesh, each shard of the data axis drains its own share of the prompts
  without talking to the others; kept prompts are dealt out evenly.

  Args:
    draw: consumed.
    num_slots: completions that decode side by side, over all devices.
    prefill_prompts: prompts that prefill side by side, over all devices.
    kept: prompts to roll out; None for all.
    sampling: the fields of `Sampling`.
  """
  if kept is None:
    ones = jnp.ones(prompts.ids.shape, jnp.float32)
    kept = Selection(ones > 0, ones)
  how = Sampling(**sampling)
  weights = transformer.unstack(params, model_config)
  decoding = start(
    weights,
    model_config,
    prompts,
    draw,
    kept,
    how,
    group_size=group_size,
    num_slots=num_slots,
    prefill_prompts=prefill_prompts,
  )
  decoding = finish(weights, model_config, decoding, how)
  return so_far(decoding, prompts, kept)


def start(
  weights: transformer.Params,
  model_config: transformer.ModelConfig,
  prompts: PromptBatch,
  draw: keys.Draw,
  kept: Selection,
  sampling: Sampling,
  *,
  group_size: int,
  num_slots: int,
  prefill_prompts: int = 16,
) -> Decoding:
  """The first part of `sample`: until no completion waits for a slot.

  It is over when fewer are left than the second stage has slots for. What is
  complete by then can be graded while `finish` goes on.

  Args:
    weights: of `transformer.unstack`.
  """
  num_shards = _num_shards()

  def run(weights, prompts, keep, key):
    return _start_shard(
      weights,
      model_config,
      prompts,
      keep,
      key,
      sampling,
      group_size=group_size,
      num_slots=num_slots // num_shards,
      prefill_prompts=max(1, prefill_prompts // num_shards),
    )

  keep = kept.keep
  if num_shards > 1:
    seat = _deal(keep, num_shards)
    dealt = jnp.zeros_like(seat).at[seat].set(jnp.arange(seat.size))
    prompts, keep = jax.tree.map(lambda x: x[dealt], (prompts, keep))
  run = _on_shards(run, (jax.P(), _SLOT, _SLOT, jax.P()))
  return run(weights, prompts, keep, draw.key)


def finish(
  weights: transformer.Params,
  model_config: transformer.ModelConfig,
  decoding: Decoding,
  sampling: Sampling,
) -> Decoding:
  """The second part of `sample`: with ever fewer slots, to the end.

  Args:
    weights: of `transformer.unstack`.
  """

  def run(weights, decoding):
    sizes = [*slot_sizes(decoding.slots.item.shape[0]), 0]
    for size, next_size in itertools.pairwise(sizes[1:]):
      slots = gather_busy(decoding.slots, size, decoding.uniform.shape[0])
      decoding = jax.lax.while_loop(
        has_more(next_size),
        lambda x: step(weights, model_config, x, sampling),
        decoding._replace(slots=slots),
      )
    # Nobody needs what the slots hold, and there are fewer now.
    return decoding._replace(slots=None)

  run = _on_shards(run, (jax.P(), _SHARDS), _SHARDS._replace(slots=None))
  return run(weights, decoding)


def so_far(
  decoding: Decoding, prompts: PromptBatch, kept: Selection
) -> Rollout:
  """Completions, whole where they stopped or have as many tokens as may be."""
  num_prompts, num_shards = prompts.ids.shape[0], decoding.num_done.shape[0]
  written = jax.tree.map(
    lambda x: x.reshape(num_prompts, -1, *x.shape[1:]), decoding.written
  )
  if num_shards > 1:
    seat = _deal(kept.keep, num_shards)
    written = jax.tree.map(lambda x: x[seat], written)
  return Rollout(
    prompt_ids=prompts.ids,
    kept=kept,
    # All shards wait for the slowest.
    slot_steps=decoding.slot_steps.max() * num_shards,
    **written._asdict(),
  )


def _num_shards() -> int:
  mesh = jax.sharding.get_abstract_mesh()
  return 1 if mesh.empty else mesh.shape["data"]


def _on_shards(run, in_specs, out_specs=_SHARDS):
  """`run`, on each shard of the data axis by itself."""
  if _num_shards() == 1:
    return run
  return jax.shard_map(
    run,
    in_specs=in_specs,
    out_specs=out_specs,
    axis_names={"data"},
    check_vma=False,
  )


def _deal(keep: Bool[Array, "N"], num_shards: int) -> Int[Array, "N"]:
  """Where each prompt goes so that every shard has as many kept ones."""
  num = keep.shape[0]
  rank = jnp.argsort(jnp.argsort(~keep, stable=True), stable=True)
  return rank % num_shards * (num // num_shards) + rank // num_shards


def _start_shard(
  weights,
  model_config,
  prompts: PromptBatch,
  keep: Bool[Array, "N"],
  key: jax.Array,
  sampling: Sampling,
  *,
  group_size: int,
  num_slots: int,
  prefill_prompts: int,
) -> Decoding:
  num_items = prompts.ids.shape[0] * group_size
  num_slots = min(num_slots, num_items)
  num_wanted = keep.sum(dtype=jnp.int32) * group_size
  # The longest first, so that prompts of a length prefill together.
  queue = jnp.argsort(jnp.where(keep, -prompts.lengths, 1)).astype(jnp.int32)
  capacity = prompts.tokens.shape[1] + sampling.max_tokens - 1
  sizes = _part_sizes(capacity)
  shared = _prefill(
    weights, model_config, prompts, queue, keep.sum(), prefill_prompts, sizes
  )
  prompt_keys = keys.for_items(key, prompts.ids)
  member = jnp.arange(group_size, dtype=jnp.int32)
  item_keys = jax.vmap(keys.for_items, (0, None))(prompt_keys, member)
  draw_all = functools.partial(jax.random.uniform, shape=(sampling.max_tokens,))

  def refill(state):
    """Gives the first idle slot the first completion that waits."""
    slots, taken = state
    slot = jnp.argmax(slots.item == num_items)
    place = taken // group_size
    prompt = queue[place]
    length = prompts.lengths[prompt]
    copy = lambda to, source: jax.lax.dynamic_update_slice_in_dim(
      to, jax.lax.dynamic_slice_in_dim(source, place, 1, 1), slot, 1
    )
    cache = [
      (*jax.tree.map(copy, parts[: len(source)], source), *parts[len(source) :])
      for parts, source in zip(slots.cache, shared, strict=True)
    ]
    slots = Slots(
      item=slots.item.at[slot].set(prompt * group_size + taken % group_size),
      # The last prompt token is read again: what follows it is sampled by
      # the same step that all other slots take.
      token=slots.token.at[slot].set(prompts.tokens[prompt, length - 1]),
      position=slots.position.at[slot].set(length - 1),
      count=slots.count.at[slot].set(0),
      cache=tuple(cache),
    )
    return slots, taken + 1

  def can_refill(state):
    slots, taken = state
    return (taken < num_wanted) & (slots.item == num_items).any()

  def refill_all(decoding, taken):
    slots, taken = jax.lax.while_loop(
      can_refill, refill, (decoding.slots, taken)
    )
    return decoding._replace(slots=slots), taken

  zeros = jnp.zeros((num_slots,), jnp.int32)
  zero, rows = zeros[:1], (num_items, sampling.max_tokens)
  empty = Decoding(
    Slots(
      item=jnp.full((num_slots,), num_items, jnp.int32),
      token=zeros,
      position=zeros,
      count=zeros,
      cache=transformer.empty_cache(model_config, num_slots, sizes),
    ),
    Written(
      tokens=jnp.zeros(rows, jnp.int32),
      logprobs=jnp.zeros(rows, jnp.float32),
      lengths=jnp.zeros((num_items,), jnp.int32),
      is_stopped=jnp.zeros((num_items,), bool),
    ),
    uniform=jax.vmap(draw_all)(item_keys.reshape(num_items)),
    num_wanted=num_wanted[None],
    num_done=zero,
    slot_steps=zero,
  )
  # Whoever waits finds a slot in this stage: no later one refills.
  is_first_stage = has_more([*slot_sizes(num_slots), 0][1])
  return jax.lax.while_loop(
    lambda state: is_first_stage(state[0]),
    lambda state: refill_all(
      step(weights, model_config, state[0], sampling), state[1]
    ),
    refill_all(empty, jnp.int32(0)),
  )[0]


def _part_sizes(capacity: int) -> list[int]:
  """Cells of each part of a cache: as many as all before it, or what is left.

  In multiples of 32, which products and vector units like.
  """
  ends = buckets.doublings(
    max(_SHORTEST, buckets.block(capacity)), buckets.round_up(capacity, 32)
  )
  return [end - start for start, end in itertools.pairwise([0, *ends])]


def _prefill(
  weights, model_config, prompts, queue, num_kept, side_by_side, sizes
):
  """Caches of the kept prompts in queue order; the others' stay zero."""
  num_prompts, longest = prompts.tokens.shape
  chunk = buckets.largest_divisor(num_prompts, side_by_side)
  # The parts that a prompt reaches into.
  starts = itertools.accumulate(sizes[:-1], initial=0)
  sizes = [x for x, at in zip(sizes, starts, strict=True) if at < longest]
  paddings = buckets.doublings(_SHORTEST, longest)

  def at_length(padded, rows):
    return transformer.prefill(
      weights,
      model_config,
      prompts.tokens[rows, :padded],
      prompts.lengths[rows],
      sizes,
    )

  def prefill_chunk(i, shared):
    rows = jax.lax.dynamic_slice(queue, (i * chunk,), (chunk,))
    needed = prompts.lengths[rows].max()
    new = jax.lax.switch(
      (needed > jnp.array(paddings[:-1], jnp.int32)).sum(),
      [functools.partial(at_length, padded) for padded in paddings],
      rows,
    )
    write = lambda x, y: jax.lax.dynamic_update_slice_in_dim(x, y, i * chunk, 1)
    return jax.tree.map(write, shared, new)

  empty = transformer.empty_cache(model_config, num_prompts, sizes)
  num_chunks = (num_kept + chunk - 1) // chunk
  return jax.lax.fori_loop(0, num_chunks, prefill_chunk, empty)
