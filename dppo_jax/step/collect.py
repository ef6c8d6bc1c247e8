"""Prompts to graded completions, the first stage of a step.

draw -> choose prompts -> roll out -> grade -> update history, once or, for
methods with dynamic sampling, until enough groups have rewards that differ.
"""

import collections
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree
import numpy as np

from dppo_jax import data, rewards
from dppo_jax.methods import Method, dynamic_sampling
from dppo_jax.models import transformer
from dppo_jax.records import PromptBatch, Rollout, Selection, TrainState
from dppo_jax.rng import Stage, StepRng, rng_at
from dppo_jax.run.setup import Run
from dppo_jax.step.clock import StageClock
from dppo_jax.step.grade import grade


class Experience(NamedTuple):
  """Graded completions of one step.

  Attributes:
    rewards: `[Q, G]`, 0 for the completions of a pruned prompt.
    num_prompts: loss denominator, in prompts.
    counts: sums over the rollouts of the step, see `grade`.
    samples: one line of samples.jsonl per completion.
  """

  prompts: PromptBatch
  rollout: Rollout
  rewards: jax.Array | np.ndarray
  num_prompts: jax.Array | np.ndarray
  counts: collections.Counter
  samples: list[dict]


class Collector(NamedTuple):
  """Rolls out and grades the prompts of a step.

  Attributes:
    programs: compiled stages by name.
    clock: receives the seconds of each stage.
  """

  run: Run
  programs: dict
  grader: rewards.Grader
  clock: StageClock

  def collect(self, state: TrainState) -> tuple[TrainState, Experience]:
    """Collects a step's experience; history and draw count advance."""
    with self.clock("rollout"):
      params = self.programs["to_inference_params"](state.params)
      params = jax.block_until_ready(params)
    if self.run.method.dynamic_sampling:
      return self.gather_groups(state, params)
    limit = np.int32(self.run.config.data.prompts_per_step)
    return self.rollout_once(state, params, int(state.draws), limit)

  def rollout_once(
    self,
    state: TrainState,
    params: transformer.Params,
    draw: int,
    limit: jax.Array | np.ndarray,
  ) -> tuple[TrainState, Experience]:
    """Rolls out and grades one batch of prompts.

    Args:
      params: the copy of the weights that rollouts read.
      draw: number of the batch of prompts.
      limit: largest number of prompts to roll out.
    """
    run, programs, _, clock = self
    num_prompts = run.config.data.prompts_per_step
    with clock("data"):
      prompts = data.draw(run.train_set, run.root_key, draw, num_prompts)
      # Prompt rules count steps, of which one may draw several times.
      rng = rng_at(run.root_key, draw, Stage.PROMPTS)._replace(step=state.step)
      kept = programs["choose_prompts"](rng, state.history, prompts.ids, limit)
    with clock("rollout"):
      rng = rng_at(run.root_key, draw, Stage.ROLLOUT)
      rollout = programs["roll_out"](params, prompts, rng, kept)
      rollout = jax.block_until_ready(rollout)
    with clock("reward"):
      graded = grade(rollout, run.train_set, run.tokenizer, self.grader)
    with clock("update_history"):
      history, draws = programs["update_history"](
        state.history,
        state.step,
        state.draws,
        rollout,
        graded.rewards,
        graded.correct,
      )
      state = state.replace(history=history, draws=draws)
      state = jax.block_until_ready(state)
    return state, Experience(
      prompts,
      rollout,
      graded.rewards,
      np.float32(num_prompts),
      graded.counts,
      graded.samples,
    )

  def gather_groups(
    self, state: TrainState, params: transformer.Params
  ) -> tuple[TrainState, Experience]:
    """Repeats `rollout_once` until enough groups have rewards that differ."""
    run, programs = self.run, self.programs
    num_prompts = run.config.data.prompts_per_step
    draws = dynamic_sampling.draws_of_step(
      run.method.dynamic_sampling,
      int(state.step),
      int(state.draws),
      draws_per_epoch=len(run.train_set) // num_prompts,
    )
    buffer, limit = None, np.int32(num_prompts)
    counts, samples = collections.Counter(), []
    for draw in draws:
      state, chunk = self.rollout_once(state, params, draw, limit)
      counts.update(chunk.counts)
      samples += chunk.samples
      with self.clock("dynamic_sampling"):
        groups = chunk.prompts, chunk.rollout, chunk.rewards
        buffer = buffer or programs["init_buffer"](*groups)
        buffer, limit, denominator = jax.block_until_ready(
          programs["add_groups"](buffer, *groups)
        )
      if int(buffer.num_groups) == num_prompts:
        break
    return state, Experience(
      buffer.prompts,
      buffer.rollout,
      buffer.rewards,
      denominator,
      counts,
      samples,
    )


def choose_prompts(
  rng: StepRng,
  history: PyTree,
  ids: Int[Array, "N"],
  limit: Int[Array, ""],
  *,
  method: Method,
) -> Selection:
  """Chooses prompts to roll out: the first `limit` of those the rule keeps."""
  return dynamic_sampling.limit(method.prompts.select(rng, history, ids), limit)


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
  """Updates the prompt rule's memory after a rollout, and counts the draw."""
  # A pruned prompt gets an id that no problem has.
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
  """Adds a chunk; returns buffer, size of the next chunk and denominator."""
  buffer = dynamic_sampling.add_groups(buffer, prompts, rollout, rewards)
  size = dynamic_sampling.next_size(buffer, rollout, rewards, rule)
  return buffer, size, dynamic_sampling.denominator(buffer, rule)
