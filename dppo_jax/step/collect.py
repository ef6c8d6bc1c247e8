"""Prompts to graded completions: what a step trains on, before any selection.

draw -> choose prompts -> roll out -> grade -> update history, once, or for a
method of dynamic sampling as often as it takes to gather enough groups whose
rewards differ.
"""

import collections
from typing import NamedTuple

import jax
import numpy as np

from dppo_jax import data, rewards
from dppo_jax.methods.dynamic_sampling import draws_of_step
from dppo_jax.metrics import writer
from dppo_jax.records import Measured, PromptBatch, Rollout, TrainState
from dppo_jax.rng import Stage, rng_at
from dppo_jax.run.setup import Run
from dppo_jax.step.grade import grade, to_metrics
from dppo_jax.step.programs import CompiledStep


class Experience(NamedTuple):
  """Graded completions of one step.

  Attributes:
    rewards: `[Q, G]`, 0 for the completions of a pruned prompt.
    num_prompts: loss denominator, in prompts.
    metrics: scalars to log.
    samples: lines of samples.jsonl, one for each completion.
  """

  prompts: PromptBatch
  rollout: Rollout
  rewards: jax.Array | np.ndarray
  num_prompts: jax.Array | np.ndarray
  writer: dict[str, float]
  samples: list[dict]


def collect(
  run: Run,
  compiled_step: CompiledStep,
  grader: rewards.Grader,
  state: TrainState,
  clock: writer.Clock,
  measured: Measured | None = None,
) -> tuple[TrainState, Experience]:
  """Rolls out and grades the next prompts.

  Also returns the state with history and draw count advanced.

  Args:
    measured: of earlier steps, where the method reads it.
  """
  num_prompts = run.config.data.prompts_per_step
  dynamic = run.method.dynamic_sampling
  counts, samples = collections.Counter(), []
  buffer, limit = None, np.int32(num_prompts)
  with clock("rollout"):
    params = jax.block_until_ready(
      compiled_step.to_inference_params(state.params)
    )
  first_draw = int(state.draws)
  draws = range(first_draw, first_draw + 1)
  if dynamic:
    per_epoch = len(run.train_set) // num_prompts
    draws = draws_of_step(dynamic, int(state.step), first_draw, per_epoch)
  for draw in draws:
    with clock("data"):
      prompts = data.draw(run.train_set, run.root_key, draw, num_prompts)
      # A prompt rule counts steps, of which one may draw several times.
      rng = rng_at(run.root_key, draw, Stage.PROMPTS)
      rng = rng._replace(step=state.step, measured=measured)
      kept, told = compiled_step.choose_prompts(
        rng, state.history, prompts.ids, limit
      )
    with clock("rollout"):
      rng = rng_at(run.root_key, draw, Stage.ROLLOUT)
      rollout = jax.block_until_ready(
        compiled_step.roll_out(params, prompts, rng, kept)
      )
    with clock("reward"):
      graded = grade(rollout, run.train_set, run.tokenizer, grader)
    counts.update(graded.counts)
    samples += graded.samples
    with clock("update_history"):
      history, num_draws = compiled_step.update_history(
        state.history,
        state.step,
        state.draws,
        rollout,
        graded.rewards,
        graded.correct,
      )
      state = jax.block_until_ready(
        state.replace(draws=num_draws, history=history)
      )
    if not dynamic:
      gathered = (prompts, rollout, graded.rewards, np.float32(num_prompts))
      break
    with clock("dynamic_sampling"):
      buffer, limit, denominator = jax.block_until_ready(
        compiled_step.add_groups(
          buffer or compiled_step.init_buffer(),
          prompts,
          rollout,
          graded.rewards,
        )
      )
      gathered = (buffer.prompts, buffer.rollout, buffer.rewards, denominator)
      if int(buffer.num_groups) == num_prompts:
        break
  values = to_metrics(counts, samples, grader.specs) | jax.device_get(told)
  return state, Experience(*gathered, values, samples)
