"""From rewards to rows: advantages, choice, weights, packing."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dppo_jax import buckets, sharding
from dppo_jax.algo import objectives, packing, weights
from dppo_jax.keys import Draw
from dppo_jax.methods import Method
from dppo_jax.records import Groups, PackedBatch, PromptBatch, Rollout


class Rows(NamedTuple):
  """The shape of packed rows.

  Attributes:
    length: cells in a row.
    per_micro: rows in a micro-batch.
    window: sequences among which the packer chooses.
  """

  length: int
  per_micro: int
  window: int

  def count(self, num_sequences: int, max_length: int) -> int:
    """Rows that always suffice, in whole micro-batches."""
    bound = packing.row_bound(num_sequences, max_length, self.length)
    return buckets.round_up(bound, self.per_micro)


def select(
  draw: Draw,
  prompts: PromptBatch,
  rollout: Rollout,
  rewards: Float[Array, "Q G"],
  *,
  method: Method,
  objective: objectives.Objective,
  rows: Rows,
  train_zero_advantage: bool,
) -> tuple[PackedBatch, Int[Array, ""], dict[str, Float[Array, ""]]]:
  """The completions to train on, weighted and packed.

  Advantages come from all completions of a group before any is dropped. One
  whose advantage is zero adds nothing to the gradient where beta is 0: it is
  left out of the rows, and the denominator still counts it.

  Args:
    draw: consumed by the method's completion rule.
    train_zero_advantage: packs such completions all the same.
  Returns:
    Micro-batches `[M, R, L]`, how many of them are in use, and metrics.
  """
  advantages = method.advantage(rewards)
  groups = Groups(rewards, advantages, rollout.lengths)
  chosen = method.completions(draw, groups)
  weight = weights.horvitz_thompson(rollout.kept, chosen)
  is_drawn = rollout.lengths > 0
  is_needed = (weight > 0) & is_drawn
  if not (train_zero_advantage or objective.beta):
    is_needed &= advantages != 0
  trained = jnp.where(is_needed, rollout.lengths, 0)
  batch, num_micro, info = pack(
    prompts,
    rollout.replace(lengths=trained),
    advantages,
    weight * objective.token_share(rollout.lengths),
    rows,
  )
  kept = weight > 0
  is_flat = (advantages == 0).all(axis=1) & rollout.kept.keep
  total = lambda x: x.sum(dtype=jnp.float32)
  return (
    batch,
    num_micro,
    info
    | {
      "prompts/drawn": jnp.float32(weight.shape[0]),
      "prompts/kept": total(rollout.kept.keep),
      "completions/drawn": total(is_drawn),
      "completions/kept": total(kept & is_drawn),
      "completions/trained": total(is_needed),
      "completions/dead_groups": total(is_flat),
      "tokens/generated": total(rollout.lengths),
      "tokens/trained": total(trained),
      "rollout/slot_utilisation": total(rollout.lengths)
      / jnp.maximum(rollout.slot_steps, 1).astype(jnp.float32),
      "tokens/completion_mean": total(rollout.lengths)
      / jnp.maximum(total(is_drawn), 1.0),
      "completions/stopped": total(rollout.is_stopped)
      / jnp.maximum(total(is_drawn), 1.0),
      "weights/max": weight.max(),
      "weights/mean": total(weight) / weight.size,
      "weights/ess": weights.effective_sample_size(weight, jnp.abs(advantages)),
    },
  )


def pack(
  prompts: PromptBatch,
  rollout: Rollout,
  advantages: Float[Array, "Q G"],
  token_weights: Float[Array, "Q G"],
  rows: Rows,
) -> tuple[PackedBatch, Int[Array, ""], dict[str, Float[Array, ""]]]:
  """Micro-batches `[M, R, L]` of the sequences whose length is not 0.

  Returns:
    The micro-batches, how many are in use, and metrics; `pack/missing_rows`
    above 0 means that the rows did not suffice.
  """
  everywhere = lambda x: sharding.constrain(x, *(None,) * x.ndim)
  prompts, rollout, advantages, token_weights = jax.tree.map(
    everywhere, (prompts, rollout, advantages, token_weights)
  )
  lengths = packing.sequence_lengths(prompts.lengths, rollout.lengths)
  longest = prompts.tokens.shape[1] + rollout.tokens.shape[2] - 1
  num_rows = rows.count(lengths.size, longest)
  plan = packing.plan(lengths.reshape(-1), rows.length, num_rows, rows.window)
  batch = packing.fill(
    plan,
    prompts,
    rollout,
    advantages,
    token_weights,
    num_rows,
    rows.length,
  )
  micro = lambda x: sharding.constrain(
    x.reshape(-1, rows.per_micro, rows.length), None, "batch", None
  )
  num_used = plan.num_used
  cells = jnp.maximum(num_used, 1).astype(jnp.float32) * rows.length
  info = {
    "pack/rows": num_used.astype(jnp.float32),
    "pack/fill": lengths.sum(dtype=jnp.float32) / cells,
    "pack/missing_rows": jnp.maximum(num_used - num_rows, 0).astype(
      jnp.float32
    ),
  }
  num_micro = (num_used + rows.per_micro - 1) // rows.per_micro
  return jax.tree.map(micro, batch), num_micro, info
