"""Sampling completions: continuous batching as one pure function.

Every prompt is prefilled once. A fixed number of decode slots then draws from
the completions that wait: a slot whose sequence stops takes the next one
inside the same compiled loop, starting from a copy of its prompt's cache.
When fewer completions are left than slots, the slots still at work move
together and the loop goes on with fewer.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dppo_jax import buckets, keys, sharding
from dppo_jax.models import transformer
from dppo_jax.records import PromptBatch, Rollout, Selection

_FEWEST_SLOTS = 3
_SHORTEST = 128  # cells; prompts are padded to this, its double, ...
_BLOCK = 128  # tokens of the vocabulary that are summed first


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


def slot_sizes(num_slots: int) -> list[int]:
  """How many slots each stage of the decode loop has, largest first.

  A sixth fewer each time, at most half: with lengths that are geometric and
  four completions a slot, 0.95 of them are busy. Each stage is compiled.
  """
  sizes, fewer = [num_slots], -(-num_slots // 6)
  while sizes[-1] > _FEWEST_SLOTS:
    sizes.append(max(sizes[-1] - fewer, sizes[-1] // 2))
  return sizes


def sample(
  params: transformer.Params,
  model_config: transformer.ModelConfig,
  prompts: PromptBatch,
  draw: keys.Draw,
  *,
  group_size: int,
  max_tokens: int,
  num_slots: int,
  stop_ids: tuple[int, ...],
  temperature: float = 1.0,
  top_k: int = 0,
  top_p: float = 1.0,
  prefill_prompts: int = 16,
  kept: Selection | None = None,
) -> Rollout:
  """`group_size` completions of each prompt that was kept.

  A completion's randomness comes from its prompt's id, its number in the group
  and the token's index: its tokens depend neither on its slot or neighbours,
  nor on which other prompts were kept, nor on the number of devices.

  Under a mesh, each shard of the data axis drains its own share of the prompts
  without talking to the others; kept prompts are dealt out evenly.

  Args:
    draw: consumed.
    max_tokens: tokens of a completion, stop token included.
    num_slots: completions that decode side by side, over all devices.
    stop_ids: tokens that end a completion; they are its last token.
    temperature: 0 takes the likeliest token, with a log-probability of 0.
    top_k: sample among the k likeliest tokens; 0 for all of them.
    top_p: sample among the likeliest tokens that hold this much probability.
    prefill_prompts: prompts that prefill side by side, over all devices.
    kept: prompts to roll out; None for all.
  """
  num_prompts = prompts.ids.shape[0]
  if kept is None:
    ones = jnp.ones((num_prompts,), jnp.float32)
    kept = Selection(ones > 0, ones)
  mesh = jax.sharding.get_abstract_mesh()
  num_shards = 1 if mesh.empty else mesh.shape["data"]

  def run_shard(params, prompts, keep, key):
    return _sample_shard(
      params,
      model_config,
      prompts,
      keep,
      key,
      group_size=group_size,
      max_tokens=max_tokens,
      num_slots=num_slots // num_shards,
      stop_ids=stop_ids,
      temperature=temperature,
      top_k=top_k,
      top_p=top_p,
      prefill_prompts=max(1, prefill_prompts // num_shards),
    )

  params = transformer.cast(params, model_config)
  if num_shards == 1:
    written, slot_steps = run_shard(params, prompts, kept.keep, draw.key)
  else:
    spec = jax.sharding.PartitionSpec
    seat = _deal(kept.keep, num_shards)
    dealt = jnp.zeros_like(seat).at[seat].set(jnp.arange(num_prompts))
    written, slot_steps = jax.shard_map(
      run_shard,
      in_specs=(spec(), spec("data"), spec("data"), spec()),
      out_specs=spec("data"),
      axis_names={"data"},
      check_vma=False,
    )(
      params,
      jax.tree.map(lambda x: x[dealt], prompts),
      kept.keep[dealt],
      draw.key,
    )
    written = jax.tree.map(
      lambda x: x.reshape(num_prompts, group_size, *x.shape[1:])[seat],
      written,
    )
  group = lambda x: x.reshape(num_prompts, group_size, *x.shape[1:])
  written = Written(*(group(x) if num_shards == 1 else x for x in written))
  return Rollout(
    prompt_ids=prompts.ids,
    kept=kept,
    # All shards wait for the slowest.
    slot_steps=slot_steps.max() * num_shards,
    **written._asdict(),
  )


def _deal(keep: Bool[Array, "N"], num_shards: int) -> Int[Array, "N"]:
  """Where each prompt goes so that every shard has as many kept ones."""
  num = keep.shape[0]
  rank = jnp.argsort(jnp.argsort(~keep, stable=True), stable=True)
  return rank % num_shards * (num // num_shards) + rank // num_shards


def _sample_shard(
  params,
  model_config,
  prompts: PromptBatch,
  keep: Bool[Array, "N"],
  key: jax.Array,
  *,
  group_size: int,
  max_tokens: int,
  num_slots: int,
  stop_ids: tuple[int, ...],
  temperature: float,
  top_k: int,
  top_p: float,
  prefill_prompts: int,
) -> tuple[Written, Int[Array, "1"]]:
  """One shard's completions, and its slots times its steps."""
  num_prompts, _ = prompts.tokens.shape
  num_items = num_prompts * group_size
  num_slots = min(num_slots, num_items)
  num_waiting = keep.sum(dtype=jnp.int32) * group_size
  # The longest first, so that prompts of a length prefill together.
  queue = jnp.argsort(jnp.where(keep, -prompts.lengths, 1)).astype(jnp.int32)
  capacity = prompts.tokens.shape[1] + max_tokens - 1
  block = buckets.block(capacity)
  shared = _prefill(
    params, model_config, prompts, queue, keep.sum(), prefill_prompts, block
  )
  prompt_keys = keys.for_items(key, prompts.ids)
  member = jnp.arange(group_size, dtype=jnp.int32)
  item_keys = jax.vmap(keys.for_items, (0, None))(prompt_keys, member)
  draw_all = functools.partial(jax.random.uniform, shape=(max_tokens,))
  uniform = jax.vmap(draw_all)(item_keys.reshape(num_items))
  stops = jnp.asarray(stop_ids, jnp.int32)

  def refill(state):
    """Gives the first idle slot the first completion that waits."""
    slots, taken = state
    slot = jnp.argmax(slots.item == num_items)
    place = taken // group_size
    prompt = queue[place]
    length = prompts.lengths[prompt]
    copy = lambda cache, shared: jax.lax.dynamic_update_slice(
      cache,
      jax.lax.dynamic_index_in_dim(shared, place, 2),
      (0, 0, slot, 0, 0, 0),
    )
    slots = Slots(
      item=slots.item.at[slot].set(prompt * group_size + taken % group_size),
      # The last prompt token is read again: what follows it is sampled by
      # the same step that all other slots take.
      token=slots.token.at[slot].set(prompts.tokens[prompt, length - 1]),
      position=slots.position.at[slot].set(length - 1),
      count=slots.count.at[slot].set(0),
      cache=jax.tree.map(copy, slots.cache, shared),
    )
    return slots, taken + 1

  def can_refill(state):
    slots, taken = state
    return (taken < num_waiting) & (slots.item == num_items).any()

  def refill_all(state):
    slots, taken, *rest = state
    return *jax.lax.while_loop(can_refill, refill, (slots, taken)), *rest

  def step(state):
    slots, taken, written, done, slot_steps = state
    hidden, cache = transformer.decode(
      params, model_config, slots.token, slots.position, slots.cache
    )
    # Whole on each device: a shard may wait for those of its own prompts
    # alone, since others take more steps or fewer.
    scores = sharding.constrain(
      transformer.logits(params, model_config, hidden), "batch", None
    )
    at = (slots.item, slots.count)
    token, logprob = choose(scores, uniform[at], temperature, top_k, top_p)
    is_stop = (token[:, None] == stops).any(-1)
    is_live = slots.item < num_items
    is_done = is_live & (is_stop | (slots.count + 1 == max_tokens))
    written = Written(
      tokens=written.tokens.at[at].set(token, mode="drop"),
      logprobs=written.logprobs.at[at].set(logprob, mode="drop"),
      lengths=written.lengths.at[slots.item].set(slots.count + 1, mode="drop"),
      is_stopped=written.is_stopped.at[slots.item].set(is_stop, mode="drop"),
    )
    slots = Slots(
      item=jnp.where(is_done, num_items, slots.item),
      token=token,
      # An idle slot stays at cell 0, so that it does not lengthen the reads.
      position=jnp.where(is_live & ~is_done, slots.position + 1, 0),
      count=jnp.where(is_live, slots.count + 1, 0),
      cache=cache,
    )
    done = done + is_done.sum(dtype=jnp.int32)
    return slots, taken, written, done, slot_steps + slots.item.shape[0]

  zeros = jnp.zeros((num_slots,), jnp.int32)
  num_blocks = buckets.round_up(capacity, block) // block
  state = (
    Slots(
      item=jnp.full((num_slots,), num_items, jnp.int32),
      token=zeros,
      position=zeros,
      count=zeros,
      cache=transformer.empty_cache(model_config, num_slots, num_blocks, block),
    ),
    jnp.int32(0),
    Written(
      tokens=jnp.zeros((num_items, max_tokens), jnp.int32),
      logprobs=jnp.zeros((num_items, max_tokens), jnp.float32),
      lengths=jnp.zeros((num_items,), jnp.int32),
      is_stopped=jnp.zeros((num_items,), bool),
    ),
    jnp.int32(0),
    jnp.int32(0),
  )
  sizes = slot_sizes(num_slots)
  state = refill_all(state)
  for size, next_size in zip(sizes, [*sizes[1:], 0], strict=True):
    slots, *rest = state
    has_more = lambda state, limit=next_size: num_waiting - state[3] > limit
    # Whoever waits finds a slot in the first stage; only that one refills.
    body = (lambda s: refill_all(step(s))) if size == num_slots else step
    if size < num_slots:
      slots = _gather_busy(slots, size, num_items)
    state = jax.lax.while_loop(has_more, body, (slots, *rest))
  _, _, written, _, slot_steps = state
  return written, slot_steps[None]


def _gather_busy(slots: Slots, size: int, idle: int) -> Slots:
  """`size` of the slots, those at work among them."""
  chosen = jnp.argsort(slots.item == idle, stable=True)[:size]

  def move(x):  # as a matrix of pieces, which compiles in a third of the time
    pieces = x.reshape(-1, x.shape[2], math.prod(x.shape[3:]))
    return pieces[:, chosen].reshape(*x.shape[:2], size, *x.shape[3:])

  return Slots(
    *(x[chosen] for x in slots[:-1]), cache=jax.tree.map(move, slots.cache)
  )


def _prefill(
  params, model_config, prompts, queue, num_kept, side_by_side, block
):
  """Caches of the kept prompts in queue order; the others' stay zero."""
  num_prompts, longest = prompts.tokens.shape
  chunk = buckets.largest_divisor(num_prompts, side_by_side)
  num_blocks = buckets.round_up(longest, block) // block
  empty = functools.partial(
    transformer.empty_cache, model_config, num_blocks=num_blocks, block=block
  )
  paddings = buckets.doublings(_SHORTEST, longest)

  def at_length(padded, rows):
    new = transformer.prefill(
      params,
      model_config,
      prompts.tokens[rows, :padded],
      prompts.lengths[rows],
      block,
    )
    put = lambda x, y: jax.lax.dynamic_update_slice(x, y, (0,) * x.ndim)
    return jax.tree.map(put, empty(chunk), new)

  def prefill_chunk(i, shared):
    rows = jax.lax.dynamic_slice(queue, (i * chunk,), (chunk,))
    needed = prompts.lengths[rows].max()
    new = jax.lax.switch(
      (needed > jnp.array(paddings[:-1], jnp.int32)).sum(),
      [functools.partial(at_length, padded) for padded in paddings],
      rows,
    )
    write = lambda x, y: jax.lax.dynamic_update_slice(
      x, y, (0, 0, i * chunk, 0, 0, 0)
    )
    return jax.tree.map(write, shared, new)

  num_chunks = (num_kept + chunk - 1) // chunk
  return jax.lax.fori_loop(0, num_chunks, prefill_chunk, empty(num_prompts))


def choose(
  scores: Float[Array, "B V"],
  uniform: Float[Array, "B"],
  temperature: float,
  top_k: int = 0,
  top_p: float = 1.0,
) -> tuple[Int[Array, "B"], Float[Array, "B"]]:
  """A token for each row of scores, and its log-probability when sampled.

  The log-probability is that of the distribution that was sampled, after
  temperature and truncation.

  Args:
    uniform: random numbers of [0, 1); one for a token, not one for each of the
      vocabulary.
  """
  if temperature == 0:
    token = jnp.argmax(scores, axis=-1).astype(jnp.int32)
    return token, jnp.zeros(token.shape, jnp.float32)
  scores = scores / temperature
  if top_k:
    lowest = jax.lax.top_k(scores, top_k)[0][:, -1:]
    scores = jnp.where(scores < lowest, -jnp.inf, scores)
  if top_p < 1:
    ordered = -jnp.sort(-scores, axis=-1)
    share = jax.nn.softmax(ordered, axis=-1)
    is_needed = jnp.cumsum(share, axis=-1) - share < top_p
    lowest = jnp.where(is_needed, ordered, jnp.inf).min(-1, keepdims=True)
    scores = jnp.where(scores < lowest, -jnp.inf, scores)
  logprobs = jax.nn.log_softmax(scores, axis=-1)
  token = _invert(jnp.exp(logprobs), uniform)
  return token, jnp.take_along_axis(logprobs, token[:, None], axis=-1)[:, 0]


def _invert(
  probs: Float[Array, "B V"], uniform: Float[Array, "B"]
) -> Int[Array, "B"]:
  """The token at which the running sum of `probs` passes `uniform`.

  It sums within blocks of the vocabulary, then over blocks. What is looked for
  stays below each total, so a token of probability 0 is never found.

  Args:
    uniform: in [0, 1), a multiple of 2^-23.
  """
  batch, vocab = probs.shape
  blocks = jnp.pad(probs, ((0, 0), (0, -vocab % _BLOCK)))
  blocks = blocks.reshape(batch, -1, _BLOCK)
  sums = blocks.sum(-1)
  ends = jnp.cumsum(sums, -1)
  target = uniform * ends[:, -1]
  block = (ends <= target[:, None]).sum(-1, dtype=jnp.int32)
  at_block = lambda x: jnp.take_along_axis(x, block[:, None], 1)[:, 0]
  inside = jnp.cumsum(
    jnp.take_along_axis(blocks, block[:, None, None], 1)[:, 0], -1
  )
  rest = target - (at_block(ends) - at_block(sums))
  rest = jnp.minimum(rest, inside[:, -1] * (1 - 2.0**-22))
  return block * _BLOCK + (inside <= rest[:, None]).sum(-1, dtype=jnp.int32)
