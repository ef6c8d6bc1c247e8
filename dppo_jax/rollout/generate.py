"""Sampling completions: continuous batching as one pure function.

Every prompt is prefilled once. A fixed number of decode slots then takes the
completions in turn: a slot whose sequence stops takes the next one inside the
same compiled loop, starting from a copy of its prompt's cache. When fewer
completions are left than slots, the busy slots move together and the loop goes
on with fewer.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from dppo_jax import sharding
from dppo_jax.models import kv_cache, transformer
from dppo_jax.records import PromptBatch, Rollout, Selection
from dppo_jax.rng import StepRng, as_step_rng, keys_for_ids
from dppo_jax.rollout.decode import (
  DecodeOutput,
  DecodeState,
  Slots,
  compact_slots,
  decode_step,
  loop,
  more_unfinished_than,
  slot_schedule,
)
from dppo_jax.rollout.prefill import batch_size, prefill_prompts
from dppo_jax.rollout.sampling import Sampling


def sample(
  params: transformer.Params,
  model_config: transformer.ModelConfig,
  prompts: PromptBatch,
  rng: StepRng | jax.Array,
  *,
  group_size: int,
  num_slots: int,
  prefill_batch: int | None = None,
  kept: Selection | None = None,
  platform: str = "cpu",
  **sampling,
) -> Rollout:
  """`group_size` completions of each prompt that was kept.

  A completion's randomness comes from its prompt's id, its number in the group
  and the token's index: its tokens depend neither on its slot or neighbours,
  nor on which other prompts were kept, nor on the number of devices.

  Under a mesh, each shard of the batch drains its own share of the prompts
  without talking to the others; kept prompts are divided evenly.

  Args:
    rng: consumed; a key alone will do.
    num_slots: completions that decode side by side, on each of these
      shards.
    prefill_batch: prompts that prefill together on each of them; None is
      `prefill.batch_size`.
    kept: prompts to roll out; None for all.
    platform: of the devices, cpu, gpu or tpu, which the number of compiled
      stages is chosen for; it changes no token.
    sampling: the fields of `Sampling`.
  """
  prompts = jax.tree.map(jnp.asarray, prompts)
  if kept is None:
    ones = jnp.ones(prompts.ids.shape, jnp.float32)
    kept = Selection(ones > 0, ones)
  return roll_out(
    transformer.to_inference_params(params, model_config),
    prompts,
    as_step_rng(rng),
    kept,
    model_config=model_config,
    sampling=Sampling(**sampling),
    group_size=group_size,
    num_slots=num_slots,
    prefill_batch=prefill_batch,
    platform=platform,
  )


def roll_out(
  params: transformer.Params,
  prompts: PromptBatch,
  rng: StepRng,
  kept: Selection,
  *,
  model_config: transformer.ModelConfig,
  sampling: Sampling,
  group_size: int,
  num_slots: int,
  prefill_batch: int | None = None,
  platform: str = "cpu",
) -> Rollout:
  """`sample` from weights that are laid out for it already.

  Args:
    params: of `transformer.to_inference_params`.
    group_size, num_slots, ...: as in `sample`.
  """
  num_slots = min(
    num_slots,
    prompts.ids.shape[0] // sharding.num_shards_here("batch") * group_size,
  )
  schedule = slot_schedule(num_slots, platform)

  def run(params, prompts, keep, key):
    state = _first_stage(
      params,
      model_config,
      prompts,
      keep,
      key,
      sampling,
      schedule,
      group_size=group_size,
      prefill_batch=prefill_batch or batch_size(prompts.tokens.shape[1]),
    )
    state = _later_stages(params, model_config, state, sampling, schedule)
    return state.output, state.slot_steps

  keep, num_shards = kept.keep, sharding.num_shards_here("batch")
  if num_shards == 1:
    output, slot_steps = run(params, prompts, keep, rng.key)
  else:
    place = _balance_shards(keep, num_shards)
    order = jnp.zeros_like(place).at[place].set(jnp.arange(place.size))
    dealt = jax.tree.map(lambda x: x[order], (prompts, keep))
    by_prompt = sharding.spec(("batch",))
    output, slot_steps = jax.shard_map(
      run,
      in_specs=(
        transformer.inference_specs(model_config),
        by_prompt,
        by_prompt,
        jax.P(),
      ),
      out_specs=by_prompt,
      axis_names=set(sharding.RULES["batch"]),
      check_vma=False,
    )(params, *dealt, rng.key)
  output = jax.tree.map(
    lambda x: x.reshape(len(keep), -1, *x.shape[1:]), output
  )
  if num_shards > 1:
    output = jax.tree.map(lambda x: x[place], output)
  return Rollout(
    prompt_ids=prompts.ids,
    kept=kept,
    # All shards wait for the slowest.
    slot_steps=slot_steps.max() * num_shards,
    **output._asdict(),
  )


def _balance_shards(keep: Bool[Array, "N"], num_shards: int) -> Int[Array, "N"]:
  """Where each prompt goes so that every shard has as many kept ones."""
  num = keep.shape[0]
  rank = jnp.argsort(jnp.argsort(~keep, stable=True), stable=True)
  return rank % num_shards * (num // num_shards) + rank // num_shards


def _first_stage(
  params,
  model_config,
  prompts: PromptBatch,
  keep: Bool[Array, "N"],
  key: jax.Array,
  sampling: Sampling,
  schedule: list[int],
  *,
  group_size: int,
  prefill_batch: int,
) -> DecodeState:
  """Prefill, then decoding until fewer are left than the next stage takes."""
  num_items = prompts.ids.shape[0] * group_size
  num_slots = schedule[0]
  num_wanted = keep.sum(dtype=jnp.int32) * group_size
  # The longest first, so that prompts of a length prefill together.
  queue = jnp.argsort(jnp.where(keep, -prompts.lengths, 1)).astype(jnp.int32)
  sizes = kv_cache.part_sizes(prompts.tokens.shape[1] + sampling.max_tokens - 1)
  prompt_cache = prefill_prompts(
    params,
    model_config,
    prompts,
    queue,
    keep.sum(),
    prefill_batch,
    sizes,
  )
  prompt_keys = keys_for_ids(key, prompts.ids)
  member = jnp.arange(group_size, dtype=jnp.int32)
  item_keys = jax.vmap(keys_for_ids, (0, None))(prompt_keys, member)
  draw_all = functools.partial(jax.random.uniform, shape=(sampling.max_tokens,))

  def refill(carry):
    """Gives the first idle slot the next completion."""
    slots, taken = carry
    slot = jnp.argmax(slots.item == num_items)
    place = taken // group_size
    prompt = queue[place]
    length = prompts.lengths[prompt]
    slots = Slots(
      item=slots.item.at[slot].set(prompt * group_size + taken % group_size),
      # The last prompt token is read again: what follows it is sampled by
      # the same step that all other slots take.
      token=slots.token.at[slot].set(prompts.tokens[prompt, length - 1]),
      position=slots.position.at[slot].set(length - 1),
      count=slots.count.at[slot].set(0),
      cache=kv_cache.copy_slot(slots.cache, slot, prompt_cache, place),
    )
    return slots, taken + 1

  def can_refill(carry):
    slots, taken = carry
    return (taken < num_wanted) & (slots.item == num_items).any()

  def refill_all(state, taken):
    slots, taken = jax.lax.while_loop(can_refill, refill, (state.slots, taken))
    return state._replace(slots=slots), taken

  zeros = jnp.zeros((num_slots,), jnp.int32)
  zero, rows = zeros[:1], (num_items, sampling.max_tokens)
  empty = DecodeState(
    Slots(
      item=jnp.full((num_slots,), num_items, jnp.int32),
      token=zeros,
      position=zeros,
      count=zeros,
      cache=kv_cache.init(model_config, num_slots, sizes),
    ),
    DecodeOutput(
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
  # Every waiting completion finds a slot in this stage: no later one refills.
  is_first_stage = more_unfinished_than([*schedule, 0][1])
  state, _ = loop(
    lambda carry: is_first_stage(carry[0]),
    lambda carry: refill_all(
      decode_step(params, model_config, carry[0], sampling), carry[1]
    ),
    refill_all(empty, jnp.int32(0)),
    transformer.gathers_layers(model_config),
  )
  return state


def _later_stages(
  params,
  model_config,
  state: DecodeState,
  sampling: Sampling,
  schedule: list[int],
) -> DecodeState:
  """Decoding to the end with ever fewer slots."""
  for size, next_size in itertools.pairwise([*schedule[1:], 0]):
    slots = compact_slots(state.slots, size, state.uniform.shape[0])
    state = loop(
      more_unfinished_than(next_size),
      lambda x: decode_step(params, model_config, x, sampling),
      state._replace(slots=slots),
      transformer.gathers_layers(model_config),
    )
  return state
