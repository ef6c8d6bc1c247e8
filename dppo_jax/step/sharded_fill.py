"""Rows of packed sequences, filled on the devices that train on them.

All shards of the batch know the plan, which is made of lengths. Tokens go round
from shard to shard, those of a few prompts at a time, and each shard takes what
its rows read: none ever holds the tokens of all.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from dppo_jax import sharding
from dppo_jax.algo import packing
from dppo_jax.records import PackedBatch, PromptBatch, Rollout

# The fields of a rollout that rows read.
_READ = ("tokens", "logprobs")


def fill(
  plan: packing.Plan,
  counts: packing.TokenCounts,
  prompts: PromptBatch,
  rollout: Rollout,
  advantages: Float[Array, "Q G"],
  weights: Float[Array, "Q G"],
  *,
  num_rows: int,
  row_length: int,
  rows_per_micro: int,
  spread_rows: bool = False,
) -> PackedBatch:
  """`packing.fill` as micro-batches `[M, R, L]`, on the mesh that is set.

  Args:
    num_rows: a multiple of `rows_per_micro`, which the shards divide evenly.
    spread_rows: as in `select.PackingSpec`.
  """
  shards = sharding.num_shards_here("batch")
  if shards == 1:
    batch = packing.fill(
      *(plan, counts, prompts, rollout, advantages, weights),
      *(num_rows, row_length),
    )
    return _in_micros(batch, rows_per_micro)
  texts = {
    "prompts": prompts.tokens,
    "rollout": {name: getattr(rollout, name) for name in _READ},
  }
  num_missing = -len(prompts.tokens) % shards  # of as many prompts on each
  pad = lambda x: jnp.pad(x, ((0, num_missing), *((0, 0),) * (x.ndim - 1)))
  spread = lambda x: sharding.constrain(
    pad(x), "batch", *(None,) * (x.ndim - 1)
  )

  def fill_shard(texts, plan, counts, lengths, *of_each):
    shard = jax.lax.axis_index(sharding.RULES["batch"])
    here = rows_per_micro // shards
    micro, row = plan.row // rows_per_micro, plan.row % rows_per_micro
    to, at = row // here, row % here
    if spread_rows:
      to, at = row % shards, row // shards
    is_here = (plan.row >= 0) & (to == shard)
    own = plan._replace(
      row=jnp.where(is_here, micro * here + at, -1),
      # What spoils the batch is in its first row.
      num_unplaced=jnp.where(shard == 0, plan.num_unplaced, 0),
    )
    prompt_lengths, completion_lengths = lengths
    batch = packing.fill(
      own,
      counts,
      PromptBatch(prompt_lengths, texts["prompts"], prompt_lengths),
      Rollout(prompt_lengths, lengths=completion_lengths, **texts["rollout"]),
      *of_each,
      *(num_rows // shards, row_length),
      reader=functools.partial(_read_in_turn, shards=shards),
    )
    return _in_micros(batch, here)

  by_row = sharding.spec((None, "batch", None))
  return jax.shard_map(
    fill_shard,
    in_specs=(sharding.spec(("batch",)), *(jax.P(),) * 5),
    out_specs=by_row,
    axis_names=set(sharding.RULES["batch"]),
    check_vma=False,
  )(
    jax.tree.map(spread, texts),
    *(plan, counts, (prompts.lengths, rollout.lengths), advantages, weights),
  )


def _read_in_turn(
  layout: packing.Layout, prompts: PromptBatch, rollout: Rollout, shards: int
) -> packing.Texts:
  """`packing.read` while the tokens of each shard come by."""
  axes = sharding.RULES["batch"]
  to_next = [(i, (i + 1) % shards) for i in range(shards)]
  shard, num_here = jax.lax.axis_index(axes), len(prompts.tokens)

  def turn(i, carry):
    found, prompts, rollout = carry
    first = (shard - i) % shards * num_here
    new = packing.read(layout, prompts, rollout, first)
    # At most one shard has what a position reads; the others say 0.
    found = jax.tree.map(jnp.add, found, new)
    pass_on = lambda x: jax.lax.ppermute(x, axes, to_next)
    texts = {name: getattr(rollout, name) for name in _READ}
    return (
      found,
      prompts.replace(tokens=pass_on(prompts.tokens)),
      rollout.replace(**jax.tree.map(pass_on, texts)),
    )

  nothing = jax.tree.map(
    lambda x: jnp.zeros(x.shape, x.dtype),
    jax.eval_shape(packing.read, layout, prompts, rollout),
  )
  return jax.lax.fori_loop(0, shards, turn, (nothing, prompts, rollout))[0]


def _in_micros(batch: PackedBatch, rows: int) -> PackedBatch:
  return jax.tree.map(lambda x: x.reshape(-1, rows, *x.shape[1:]), batch)
