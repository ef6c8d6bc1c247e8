"""Sampling completions: continuous batching as one pure function.

Every prompt is prefilled once. Completions then take turns in a fixed number of
decode slots: as soon as a sequence stops, its slot takes the next completion
inside the same compiled loop, starting from a copy of its prompt's cache. When
few completions are left, the busy slots are moved together and the loop
continues with fewer slots.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dppo_jax import sharding
from dppo_jax.algo.validation import COUNT, Limit, check
from dppo_jax.models import kv_cache, parameters, transformer
from dppo_jax.models.config import ModelConfig
from dppo_jax.records import PromptBatch, Rollout, Selection
from dppo_jax.rng import StepRng, as_step_rng, keys_for_ids
from dppo_jax.rollout import decode
from dppo_jax.rollout.sampling import Sampling


def sample(
  params: parameters.Params,
  model_config: ModelConfig,
  prompts: PromptBatch,
  rng: StepRng | jax.Array,
  *,
  group_size: int,
  num_slots: int,
  kept: Selection | None = None,
  **sampling,
) -> Rollout:
  """Samples `group_size` completions of each kept prompt.

  A token's random number comes from the prompt's id, the completion's number in
  the group and the token's index. But for rounding, tokens thus do not depend
  on slots, on the other prompts or on the number of devices: matrix products of
  another shape round differently, which may move a draw in the tail of a large
  vocabulary to a neighbouring token. On a mesh, all shards of the batch decode
  the same number of kept prompts, independently of each other.

  The first call compiles, and any call with other shapes or options.

  Args:
    rng: randomness, consumed; a key is enough.
    num_slots: completions that each shard decodes at once; 0 for all.
    kept: prompts to roll out; None for all.
    sampling: the fields of `Sampling`.
  Raises:
    UserError: if a number is out of its range.
  """
  prompts = jax.tree.map(jnp.asarray, prompts)
  options = Sampling(**sampling)
  return _sample(
    params,
    prompts,
    as_step_rng(rng),
    kept or Selection.every(prompts.ids.shape),
    model_config=model_config,
    sampling=options._replace(stop_ids=tuple(map(int, options.stop_ids))),
    group_size=group_size,
    num_slots=num_slots,
  )


@functools.partial(
  jax.jit,
  static_argnames=("model_config", "sampling", "group_size", "num_slots"),
)
def _sample(params, prompts, rng, kept, *, model_config, **options) -> Rollout:
  weights = parameters.to_inference_params(params, model_config)
  return roll_out(
    weights, prompts, rng, kept, model_config=model_config, **options
  )


def roll_out(
  inference_params: parameters.Params,
  prompts: PromptBatch,
  rng: StepRng,
  kept: Selection,
  *,
  model_config: ModelConfig,
  sampling: Sampling,
  group_size: int,
  num_slots: int,
) -> Rollout:
  """Samples from weights of `to_inference_params`; see `sample`."""
  where, at_least_0 = "rollout.sample", Limit(lambda x: x >= 0, "at least 0")
  check(COUNT, where, max_tokens=sampling.max_tokens, group_size=group_size)
  check(at_least_0, where, num_slots=num_slots)
  params = inference_params
  num_shards = sharding.num_shards_here("batch")
  most_slots = prompts.ids.shape[0] // num_shards * group_size
  run = functools.partial(
    _roll_out_shard,
    model_config,
    sampling,
    group_size,
    decode.slot_schedule(min(num_slots or most_slots, most_slots)),
  )
  keep = kept.keep
  if num_shards == 1:
    rollout, slot_steps = run(params, prompts, keep, rng.key)
  else:
    index = _balance_shards(keep, num_shards)
    order = jnp.argsort(index)
    by_prompt = sharding.spec(("batch",))
    run = jax.shard_map(
      run,
      in_specs=(jax.P(), by_prompt, by_prompt, jax.P()),
      out_specs=by_prompt,
      axis_names=set(sharding.RULES["batch"]),
      check_vma=False,
    )
    in_order = jax.tree.map(lambda x: x[order], (prompts, keep))
    rollout, slot_steps = run(params, *in_order, rng.key)
    rollout = jax.tree.map(lambda x: x[index], rollout)
  return rollout.replace(
    kept=kept,
    # All shards wait for the slowest.
    slot_steps=slot_steps.max().astype(jnp.float32) * num_shards,
  )


def prefill_batch_size(prompt_length: int) -> int:
  """Returns the prompts that a device prefills together, up to 8,192 tokens."""
  return max(1, min(32, 8192 // prompt_length))


def _balance_shards(keep: Bool[Array, "N"], num_shards: int) -> Int[Array, "N"]:
  """Returns each prompt's new index, with equally many kept ones a shard."""
  rank = jnp.argsort(jnp.argsort(~keep, stable=True), stable=True)
  return rank % num_shards * (len(keep) // num_shards) + rank // num_shards


def _roll_out_shard(
  model_config: ModelConfig,
  sampling: Sampling,
  group_size: int,
  schedule: list[int],
  *arrays,
) -> tuple[Rollout, Int[Array, "1"]]:
  """Returns one shard's completions, and its slots times its steps."""
  params, prompts, keep, key = arrays
  # Longest first, so that prompts of similar length are prefilled together.
  order = jnp.argsort(jnp.where(keep, -prompts.lengths, 1)).astype(jnp.int32)
  slot_sizes, prompt_sizes = kv_cache.slot_and_prompt_sizes(
    model_config, prompts.tokens.shape[1], sampling.max_tokens
  )
  num_kept = keep.sum(dtype=jnp.int32)
  prompt_cache = _prefill(
    params, model_config, prompts, order, num_kept, prompt_sizes
  )
  shares = model_config.shares_prompts
  queue = decode.Queue(prompts, order, prompt_cache, group_size, shares)
  uniform = _uniform(key, prompts.ids, group_size, sampling.max_tokens)
  state = decode.init_decode_state(
    model_config, uniform, num_kept * group_size, schedule[0], slot_sizes
  )
  state = decode.refill(state, queue)
  # The first phase ends when the next one has a slot for every unfinished
  # completion: later phases refill no slots.
  limits = [*schedule[1:], 0]
  step = functools.partial(
    decode.decode_step, params, model_config, sampling, queue
  )
  for size, limit in zip(schedule, limits, strict=True):
    if size == schedule[0]:
      run = lambda state: decode.refill(step(state), queue)
    else:
      run, state = step, decode.compact_slots(state, size, not shares)
    state = decode.decode_until(limit, run, state)
  rollout = decode.completions(state, prompts.ids, sampling.stop_ids)
  return rollout, state.slot_steps[None]


def _prefill(
  params: parameters.Params,
  model_config: ModelConfig,
  prompts: PromptBatch,
  order: Int[Array, "N"],
  num_kept: Int[Array, ""],
  part_sizes: list[int],
) -> kv_cache.KVCache:
  """Returns the prompts' caches in `order`; any for a pruned prompt."""
  num_prompts, longest = prompts.tokens.shape
  chunk = min(num_prompts, prefill_batch_size(longest))
  paddings = kv_cache.prompt_paddings(longest)

  def prefill_padded(padded, rows):
    tokens, lengths = prompts.tokens[rows, :padded], prompts.lengths[rows]
    return transformer.prefill(
      params, model_config, tokens, lengths, part_sizes
    )

  def prefill_chunk(i, cache):  # the last one may repeat some of another
    rows = jax.lax.dynamic_slice(order, (i * chunk,), (chunk,))
    length = prompts.lengths[rows].max()
    chunk_cache = jax.lax.switch(
      (length > jnp.array(paddings[:-1], jnp.int32)).sum(),
      [functools.partial(prefill_padded, padded) for padded in paddings],
      rows,
    )
    return kv_cache.put_slots(cache, chunk_cache, i * chunk)

  empty = kv_cache.init(model_config, num_prompts, part_sizes)
  num_chunks = (num_kept + chunk - 1) // chunk
  with jax.named_scope("prefill"):
    return jax.lax.fori_loop(0, num_chunks, prefill_chunk, empty)


def _uniform(
  key: jax.Array, prompt_ids: Int[Array, "Q"], group_size: int, max_tokens: int
) -> Float[Array, "QG T"]:
  """Returns the random number of each token of each completion."""
  members = jnp.arange(group_size, dtype=jnp.int32)
  prompt_keys = keys_for_ids(key, prompt_ids)
  keys = jax.vmap(keys_for_ids, (0, None))(prompt_keys, members)
  numbers = functools.partial(jax.random.uniform, shape=(max_tokens,))
  return jax.vmap(numbers)(keys.reshape(len(prompt_ids) * group_size))
