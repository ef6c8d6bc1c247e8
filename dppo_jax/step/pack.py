"""Packing of a step's completions, on the devices that train on them."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dppo_jax import sharding
from dppo_jax.algo import filling, packing
from dppo_jax.records import (
  IntScalar,
  PackedBatch,
  PromptBatch,
  Rollout,
  Scalar,
)


def pack(
  prompts: PromptBatch,
  rollout: Rollout,
  advantages: Float[Array, "Q G"],
  token_weights: Float[Array, "Q G"],
  spec: packing.PackingSpec,
) -> tuple[PackedBatch, IntScalar, dict[str, Scalar]]:
  """Packs the sequences whose length is not 0 into micro-batches.

  Returns:
    Micro-batches `[M, R, L]`, how many are in use, and metrics. If
    `pack/unplaced` is above 0, sequences have no place in the rows and the loss
    is NaN: such a batch must not be trained on.
  """
  plan, counts, num_rows = _plan(prompts, rollout, spec)
  batch = _fill(
    plan,
    counts,
    prompts,
    rollout,
    _replicated(advantages),
    _replicated(token_weights),
    spec,
    num_rows,
  )
  total = lambda x: x.sum(dtype=jnp.float32)
  num_used = plan.num_used.astype(jnp.float32)
  capacity = jnp.maximum(num_used, 1) * spec.row_length
  in_use = total(batch.segment_ids > 0)
  # Positions if no completions shared a prompt.
  unshared = total(
    packing.count_tokens(prompts.lengths, rollout.lengths, False).completion
  )
  metrics = {
    "pack/rows": num_used,
    "pack/fill": in_use / capacity,
    "pack/shared": (unshared - in_use) / jnp.maximum(unshared, 1.0),
    "pack/unplaced": plan.num_unplaced.astype(jnp.float32),
  }
  return batch, -(-plan.num_used // spec.rows_per_micro), metrics


def count_rows(
  prompts: PromptBatch, rollout: Rollout, spec: packing.PackingSpec
) -> IntScalar:
  """Returns how many rows `pack` would use."""
  return _plan(prompts, rollout, spec)[0].num_used


def _replicated(x: Array) -> Array:
  """Every device computes the same plan from lengths; tokens do not move."""
  return sharding.constrain(x, *(None,) * x.ndim)


def _plan(
  prompts: PromptBatch, rollout: Rollout, spec: packing.PackingSpec
) -> tuple[packing.Plan, packing.TokenCounts, int]:
  """Returns a plan, the positions that it places, and enough rows for any."""
  counts = packing.count_tokens(
    _replicated(prompts.lengths),
    _replicated(rollout.lengths),
    spec.share_prefix,
  )
  max_length = prompts.tokens.shape[1] + rollout.tokens.shape[2] - 1
  num_rows = spec.num_rows(rollout.lengths.size, max_length)
  plan = packing.plan(counts, spec.row_length, num_rows, spec.window)
  return plan, counts, num_rows


def _fill(
  plan: packing.Plan,
  counts: packing.TokenCounts,
  prompts: PromptBatch,
  rollout: Rollout,
  advantages: Float[Array, "Q G"],
  weights: Float[Array, "Q G"],
  spec: packing.PackingSpec,
  num_rows: int,
) -> PackedBatch:
  """Fills micro-batches `[M, R, L]`, each shard of the mesh its own rows.

  Tokens are passed from shard to shard, a few prompts at a time, and each shard
  reads what its rows need: none ever holds all tokens.
  """
  shards = sharding.num_shards_here("batch")
  if shards == 1:
    batch = filling.fill(
      plan,
      counts,
      prompts,
      rollout,
      advantages,
      weights,
      num_rows,
      spec.row_length,
    )
    return _in_micros(batch, spec.rows_per_micro)
  num_missing = -len(prompts.tokens) % shards  # the same number on each shard
  pad = lambda x: jnp.pad(x, ((0, num_missing), *((0, 0),) * (x.ndim - 1)))
  spread = lambda x: sharding.constrain(
    pad(x), "batch", *(None,) * (x.ndim - 1)
  )
  rows_here = spec.rows_per_micro // shards

  def fill_shard(tokens, plan, counts, prompt_lengths, advantages, weights):
    shard = jax.lax.axis_index(sharding.RULES["batch"])
    local = _local_plan(plan, shard, shards, spec)
    layout = filling.lay_out(local, counts, num_rows // shards, spec.row_length)
    row_tokens = _read_in_turn(layout, prompt_lengths, tokens, shards)
    batch = filling.assemble(
      layout,
      row_tokens,
      prompt_lengths,
      advantages,
      weights,
      # The NaN of a bad plan is in the first row of the first shard.
      jnp.where(shard == 0, plan.num_unplaced, 0),
    )
    return _in_micros(batch, rows_here)

  return jax.shard_map(
    fill_shard,
    in_specs=(sharding.spec(("batch",)), *(jax.P(),) * 5),
    out_specs=sharding.spec((None, "batch", None)),
    axis_names=set(sharding.RULES["batch"]),
    check_vma=False,
  )(
    jax.tree.map(spread, (prompts.tokens, rollout.tokens, rollout.logprobs)),
    plan,
    counts,
    _replicated(prompts.lengths),
    advantages,
    weights,
  )


def _local_plan(
  plan: packing.Plan, shard: IntScalar, shards: int, spec: packing.PackingSpec
) -> packing.Plan:
  """Restricts a plan to the rows of one shard."""
  rows_here = spec.rows_per_micro // shards
  micro, row = plan.row // spec.rows_per_micro, plan.row % spec.rows_per_micro
  owner, place = row // rows_here, row % rows_here
  if spec.spread_rows:
    owner, place = row % shards, row // shards
  is_local = (plan.row >= 0) & (owner == shard)
  return plan._replace(row=jnp.where(is_local, micro * rows_here + place, -1))


def _read_in_turn(
  layout: filling.RowLayout,
  prompt_lengths: Int[Array, "Q"],
  tokens: tuple[Array, Array, Array],
  shards: int,
) -> filling.RowTokens:
  """Reads rows while the tokens of each shard are passed around.

  Args:
    tokens: prompt tokens, completion tokens and log-probabilities of the
      prompts of this shard.
  """
  axes = sharding.RULES["batch"]
  to_next = [(i, (i + 1) % shards) for i in range(shards)]
  shard, num_here = jax.lax.axis_index(axes), len(tokens[0])
  read = functools.partial(filling.read_rows, layout, prompt_lengths)

  def turn(i, carry):
    row_tokens, tokens = carry
    first = (shard - i) % shards * num_here
    # Exactly one shard holds each token; the others contribute 0 to the sum.
    read_here = functools.partial(read, first=first)
    row_tokens = jax.tree.map(jnp.add, row_tokens, read_here(*tokens))
    pass_on = lambda x: jax.lax.ppermute(x, axes, to_next)
    return row_tokens, jax.tree.map(pass_on, tokens)

  empty = jax.tree.map(jnp.zeros_like, jax.eval_shape(read, *tokens))
  return jax.lax.fori_loop(0, shards, turn, (empty, tokens))[0]


def _in_micros(batch: PackedBatch, rows: int) -> PackedBatch:
  return jax.tree.map(lambda x: x.reshape(-1, rows, *x.shape[1:]), batch)
