"""The stages of a training step, compiled, timed and checked."""

import collections
import time
from typing import Any, NamedTuple

import jax
from jaxtyping import ArrayLike
import numpy as np

from dppo_jax import data, distributed, rewards
from dppo_jax.methods import dynamic_sampling
from dppo_jax.methods.neyman import gradient_noise
from dppo_jax.methods.neyman.step_costs import CostTracker, StepSample
from dppo_jax.metrics import progress
from dppo_jax.models import parameters
from dppo_jax.records import (
  CompletionSummary,
  PackedBatch,
  StepCosts,
  TrainState,
)
from dppo_jax.rng import Stage, StepRng, rng_at
from dppo_jax.run.setup import Run
from dppo_jax.step import abstract_values, grade, programs, runtime_checks
from dppo_jax.step.clock import StageClock
from dppo_jax.step.collect import Experience
from dppo_jax.step.draft_choice import DraftChoice
from dppo_jax.step.optimizer import last_learning_rate
from dppo_jax.step.select import SelectInfo
from dppo_jax.step.tokens import ScoreInfo
from dppo_jax.step.update import UpdateInfo


class Batch(NamedTuple):
  """Weighted and packed completions of one step.

  Attributes:
    rows: micro-batches `[M, R, L]`.
    num_micro: micro-batches in use.
    denominator: loss denominator, in completions of the unpruned batch.
    info: result of selection and packing, on the host.
    score_info: result of token selection; None if the step has none.
  """

  rows: PackedBatch
  num_micro: jax.Array
  denominator: np.ndarray
  info: SelectInfo
  summary: CompletionSummary
  experience: Experience
  score_info: ScoreInfo | None = None


class StepInfo(NamedTuple):
  """Results of a step, for metrics, callbacks and checks.

  Attributes:
    select, score, update, summary: results of the stages, on the host.
    scalars: further metrics by name, such as the seconds of the stages.
  """

  experience: Experience
  select: SelectInfo
  score: ScoreInfo | None
  update: UpdateInfo
  summary: CompletionSummary
  scalars: dict[str, float]

  def metrics(
    self, specs: tuple[rewards.RewardSpec, ...]
  ) -> dict[str, ArrayLike]:
    """Returns the metrics of the step by name; each of `specs` has one."""
    return {
      **grade.to_metrics(
        self.experience.counts, self.experience.samples, specs
      ),
      **self.select.metrics(),
      **(self.score.metrics() if self.score else {}),
      **self.update.metrics(),
      **self.scalars,
    }


class TrainStep:
  """Compiles the stages of a run's step; its methods run them.

  `collect`, `select`, `score` and `update` are called in this order. Each
  blocks until its results are ready and adds its seconds to the clock; the
  functions are declared in programs.py. Prompts are dropped in
  `step/collect.py`, and completions in `step/select.py`, by rules of
  `methods/`, which is where a new method goes; `algo/weights.py` weights them.
  A slot gets its next completion in `rollout/decode.py`, `refill`. The loss of
  a token is in `algo/objectives.py`, called by `algo/policy_loss.py`.
  """

  def __init__(
    self, run: Run, grader: rewards.Grader, task: progress.Task | None = None
  ):
    self._run = run
    self.programs = programs.compile_programs(
      programs.programs(run), run.mesh, task
    )
    self._grader = grader
    self._tracker = CostTracker(run.packing.rows_per_micro)
    self._clock = StageClock()
    self._drafts = DraftChoice(
      [name for name in self.programs if name.startswith("roll_out")]
    )
    self._learning_rate = abstract_values.learning_rate(run)

  def collect(self, state: TrainState) -> tuple[TrainState, Experience]:
    """Rolls out and grades the next prompts; starts the clock of a step.

    History and draw count advance.
    """
    self._clock = StageClock()
    params = self._timed("to_inference_params", state.params, clock="rollout")
    if self._run.method.dynamic_sampling:
      return self._gather_groups(state, params)
    limit = np.array(self._run.config.data.prompts_per_step, np.int32)
    return self._rollout_once(state, params, int(state.draws), limit)

  def _rollout_once(
    self,
    state: TrainState,
    params: parameters.Params,
    draw: int,
    limit: jax.Array | np.ndarray,
  ) -> tuple[TrainState, Experience]:
    """Rolls out and grades at most `limit` prompts of batch number `draw`."""
    run, num_prompts = self._run, self._run.config.data.prompts_per_step
    with self._clock("data"):
      prompts = data.draw(run.train_set, run.root_key, draw, num_prompts)
      # Prompt rules count steps; a step may draw several times.
      rng = rng_at(run.root_key, draw, Stage.PROMPTS)._replace(step=state.step)
      chosen = self.programs["choose_prompts"](
        rng, state.history, prompts.ids, limit, self._costs(state)
      )
    rng = rng_at(run.root_key, draw, Stage.ROLLOUT)
    name = self._drafts.next()
    start = time.perf_counter()
    rollout = self._timed(name, params, prompts, rng, *chosen, clock="rollout")
    seconds = time.perf_counter() - start
    with self._clock("reward"):
      graded = grade.grade(rollout, run.train_set, run.tokenizer, self._grader)
    self._drafts.add(name, seconds, graded.counts["tokens"])
    history, draws = self._timed(
      "update_history",
      state.history,
      state.step,
      state.draws,
      rollout,
      graded.rewards,
      graded.correct,
    )
    return state.replace(history=history, draws=draws), Experience(
      prompts,
      rollout,
      graded.rewards,
      np.array(num_prompts, np.float32),
      graded.counts,
      graded.samples,
    )

  def _gather_groups(
    self, state: TrainState, params: parameters.Params
  ) -> tuple[TrainState, Experience]:
    """Repeats `_rollout_once` until enough groups have rewards that differ."""
    run, num_prompts = self._run, self._run.config.data.prompts_per_step
    draws = dynamic_sampling.draws_of_step(
      run.method.dynamic_sampling,
      int(state.step),
      int(state.draws),
      draws_per_epoch=len(run.train_set) // num_prompts,
    )
    buffer, limit = None, np.array(num_prompts, np.int32)
    counts: collections.Counter = collections.Counter()
    samples: list[dict] = []
    for draw in draws:
      state, chunk = self._rollout_once(state, params, draw, limit)
      counts.update(chunk.counts)
      samples += chunk.samples
      groups = chunk.prompts, chunk.rollout, chunk.rewards
      buffer = buffer or self.programs["init_buffer"](*groups)
      buffer, limit, denominator = self._timed(
        "add_groups", buffer, *groups, clock="dynamic_sampling"
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

  def select(
    self, rng: StepRng, experience: Experience, state: TrainState
  ) -> Batch:
    """Chooses the completions to train on, weights and packs them."""
    rows, num_micro, info, summary = self._timed(
      "select",
      rng.at(Stage.COMPLETIONS),
      experience.prompts,
      experience.rollout,
      experience.rewards,
      self._costs(state),
    )
    info = jax.device_get(info)
    runtime_checks.check_selection(info.pack.unplaced, info.num_invalid_probs)
    group_size = self._run.config.rollout.group_size
    denominator = np.array(experience.num_prompts, np.float32) * group_size
    return Batch(rows, num_micro, denominator, info, summary, experience)

  def score(
    self, rng: StepRng, params: parameters.Params, batch: Batch
  ) -> Batch:
    """Computes old log-probabilities and chooses tokens, where needed."""
    if "score" not in self.programs:
      return batch
    rows, info = self._timed(
      "score", rng.at(Stage.TOKENS), params, batch.rows, batch.num_micro
    )
    info = jax.device_get(info)
    runtime_checks.check_tokens(info.invalid_probs)
    return batch._replace(rows=rows, score_info=info)

  def update(
    self, state: TrainState, reference: parameters.Params | None, batch: Batch
  ) -> tuple[TrainState, StepInfo]:
    """Takes the optimizer steps on the batch; ends the clock of the step."""
    step, every = int(state.step), self._run.method.noise_every
    rng = rng_at(self._run.root_key, step, Stage.NOISE)
    state, info = self._timed(
      "update",
      state,
      reference,
      batch.rows,
      batch.num_micro,
      batch.denominator,
      *((rng, batch.info) if every else ()),
    )
    info = jax.device_get(info)
    seconds = self._clock.metrics()
    num_micro = float(jax.device_get(batch.num_micro).max())
    is_measured = bool(every) and step % every == 0
    if self._run.method.reads_costs:
      self._track(batch, num_micro + is_measured)
    options = self._run.config
    num_updates = int(state.step) * options.objective.num_updates
    scalars = {
      "update/learning_rate": last_learning_rate(
        self._learning_rate, num_updates, info.skipped
      ),
      "update/clipped_norm": info.grad_norm >= options.optimizer.clip_norm,
      "update/micro_batches": num_micro,
      **self._noise_metrics(state),
      **seconds,
    }
    return state, StepInfo(
      experience=batch.experience,
      select=batch.info,
      score=batch.score_info,
      update=info,
      summary=jax.device_get(batch.summary),
      scalars=scalars,
    )

  def _timed(self, stage: str, *args, clock: str = "") -> Any:
    """Returns the results of a stage, when they are ready."""
    with self._clock(clock or stage):
      return jax.block_until_ready(self.programs[stage](*args))

  def _costs(self, state: TrainState) -> StepCosts | None:
    """Returns the timings and noise so far, for methods that read them."""
    if not self._run.method.reads_costs:
      return None
    c = self._run.config
    return self._tracker.costs(
      jax.device_get(state.noise),
      c.rollout.group_size,
      c.objective.inner_updates,
      c.objective.mini_batches,
    )

  def _noise_metrics(self, state: TrainState) -> dict[str, float]:
    """Returns the metrics of the gradient noise, if it is measured."""
    if not self._run.method.noise_every:
      return {}
    c = self._run.config
    num_prompts = c.data.prompts_per_step // c.objective.mini_batches
    return gradient_noise.describe(jax.device_get(state.noise), num_prompts)

  def _track(self, batch: Batch, num_micro: float) -> None:
    """Adds the step to the costs; all processes use the first one's clock."""
    seconds = self._clock.seconds
    update = seconds.get("score", 0.0) + seconds["update"]
    score = batch.score_info
    sample = StepSample(
      update=update,
      other=self._clock.elapsed() - update,
      micros=num_micro,
      rows=float(batch.info.pack.rows),
      tokens=float(score.trained if score else batch.info.num_tokens),
    )
    self._tracker.add(StepSample(*distributed.gather(list(sample))[0]))
