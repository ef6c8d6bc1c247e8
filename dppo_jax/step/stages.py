"""Stages of a step that are compiled: pure functions of arrays.

The others are functions of `rollout`, `learner`, `models` and `methods` as they
are: see `compiled.programs`.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree
import optax

from dppo_jax import rollout
from dppo_jax.methods import Method, dynamic_sampling
from dppo_jax.models import transformer
from dppo_jax.records import (
  PackedBatch,
  PromptBatch,
  Rollout,
  Selection,
  TrainState,
)
from dppo_jax.rng import StepRng
from dppo_jax.step import select, update

Metrics = dict[str, jax.Array]
Params = transformer.Params


def choose_prompts(
  rng: StepRng,
  history: PyTree,
  ids: Int[Array, "N"],
  limit: Int[Array, ""],
  *,
  method: Method,
) -> tuple[Selection, Metrics]:
  """The prompts to roll out: at most the first `limit` of the method's."""
  chosen = method.prompts.select(rng, history, ids)
  kept = dynamic_sampling.limit(chosen.replace(told=None), limit)
  return kept, chosen.told or {}


def evaluate(
  params: Params, prompts: PromptBatch, rng: StepRng, *, model, **options
) -> Rollout:
  """Completions of evaluation problems."""
  return rollout.sample(params, model, prompts, rng, **options)


def score(
  params: Params,
  rng: StepRng,
  batch: PackedBatch,
  num_micro: Int[Array, "*P"],
  *,
  method: Method,
  config: update.UpdateConfig,
) -> tuple[PackedBatch, Metrics]:
  """Old log-probabilities where the update needs them, and chosen tokens."""
  stats = None
  if needs_stats(method, config):
    stats = update.score(params, config, batch, num_micro)
  return select.choose_tokens(
    rng,
    batch,
    stats,
    method=method,
    objective=config.objective,
    is_on_policy=config.is_on_policy,
  )


def needs_stats(method: Method, config: update.UpdateConfig) -> bool:
  """Whether a step takes another forward pass before its update."""
  is_read = method.tokens is not None and method.tokens.needs_stats
  return is_read or not config.is_on_policy


def train_step(
  state: TrainState,
  reference: Params | None,
  batch: PackedBatch,
  num_micro: Int[Array, "*P"],
  denominator: Float[Array, ""],
  *,
  config: update.UpdateConfig,
  optimizer: optax.GradientTransformation,
) -> tuple[TrainState, Metrics]:
  """`update.update`, and one step more on the counter."""
  state, metrics = update.update(
    state,
    reference,
    batch,
    num_micro,
    denominator,
    config=config,
    optimizer=optimizer,
  )
  return state.replace(step=state.step + 1), metrics


def update_history(
  history: PyTree,
  step: Int[Array, ""],
  draws: Int[Array, ""],
  rollout: Rollout,
  rewards: Float[Array, "Q G"],
  correct: Float[Array, "Q G"],
  *,
  method: Method,
  num_problems: int,
) -> tuple[PyTree, Int[Array, ""]]:
  """What the method remembers after a rollout, and one more draw."""
  # A pruned prompt goes by an id that no problem has.
  ids = jnp.where(rollout.kept.keep, rollout.prompt_ids, num_problems)
  history = method.prompts.observe(
    history, step, ids, rewards, correct, rollout.lengths
  )
  return history, draws + 1


def add_groups(
  buffer: dynamic_sampling.GroupBuffer,
  prompts: PromptBatch,
  rollout: Rollout,
  rewards: Float[Array, "N G"],
  *,
  rule: dynamic_sampling.DynamicSampling,
) -> tuple[dynamic_sampling.GroupBuffer, Int[Array, ""], Float[Array, ""]]:
  """The buffer with one more chunk, the next one's size, the denominator."""
  buffer = dynamic_sampling.add_groups(buffer, prompts, rollout, rewards)
  size = dynamic_sampling.next_size(buffer, rollout, rewards, rule)
  return buffer, size, dynamic_sampling.denominator(buffer, rule)
