"""The stages of a training step, compiled, timed and checked."""

import collections
from collections.abc import Mapping, Sequence
import functools
from typing import Any

import jax
import numpy as np

from dppo_jax import data, rewards
from dppo_jax.methods import dynamic_sampling
from dppo_jax.models import parameters
from dppo_jax.records import TrainState
from dppo_jax.rng import Stage, StepRng, rng_at
from dppo_jax.step import grade, programs, runtime_checks
from dppo_jax.step.clock import StageClock
from dppo_jax.step.collect import Experience
from dppo_jax.step.next_budget import NextBudget
from dppo_jax.step.optimizer import last_learning_rate
from dppo_jax.step.spec import StepSpec
from dppo_jax.step.step_info import Batch, StepInfo


class TrainStep:
  """Runs the compiled stages of a step.

  `collect`, `select`, `score` and `update` are called in this order, then
  `info`. Each blocks until its results are ready and adds its seconds to the
  clock; the functions are declared in programs.py. Prompts are dropped in
  `step/collect.py`, and completions in `step/select.py`, by rules of
  `methods/`, where a new method is a file and a line of `METHODS`. A slot gets
  its next completion in `rollout/decode.py`, `refill`. The loss of a token, of
  `algo/objectives.py`, is multiplied by its weight, 1 / probability of
  `algo/weights.py`, in `algo/policy_loss.py`, `surrogate`; the gradient is
  divided in `step/update.py`, `apply_gradient`. With several updates on a
  rollout each has its own draw, and ratios are to the sampler's
  log-probabilities, or to those that `score` computes.

  Args:
    problems: training set.
    compiled: programs of `programs.step_programs`, compiled; None compiles
      them, in a context of `jax.set_mesh(spec.mesh)`.
  """

  def __init__(
    self,
    spec: StepSpec,
    problems: data.ProblemSet,
    tokenizer: data.Tokenizer,
    grader: rewards.Grader,
    compiled: Mapping[str, jax.stages.Compiled] | None = None,
  ):
    if spec.num_problems != len(problems):
      raise ValueError(
        f"spec.num_problems is {spec.num_problems} but there are "
        f"{len(problems)} problems"
      )
    self._spec, self._problems = spec, problems
    self._tokenizer, self._grader = tokenizer, grader
    self.programs = compiled or programs.compile_programs(
      programs.step_programs(spec)
    )
    self.clock = StageClock()
    run = functools.partial(self._timed, clock="budget")
    self._budget = NextBudget(spec, run) if spec.method.budget else None

  def collect(self, state: TrainState) -> tuple[TrainState, Experience]:
    """Rolls out and grades the next prompts; starts the clock of a step.

    History and draw count advance.
    """
    self.clock = StageClock()
    params = self._timed(
      "to_inference_params", clock="rollout", params=state.params
    )
    if self._spec.method.dynamic_sampling:
      return self._gather_groups(state, params)
    limit = np.int32(self._spec.num_prompts)
    return self._rollout_once(state, params, int(state.draws), limit)

  def _rollout_once(
    self,
    state: TrainState,
    params: parameters.Params,
    draw: int,
    limit: jax.Array | np.integer,
  ) -> tuple[TrainState, Experience]:
    """Rolls out and grades at most `limit` prompts of batch number `draw`."""
    spec, root_key = self._spec, self._spec.root_key
    with self.clock("data"):
      prompts = data.draw(self._problems, root_key, draw, spec.num_prompts)
      # Prompt rules count steps; a step may draw several times.
      rng = rng_at(root_key, draw, Stage.PROMPTS)._replace(step=state.step)
      chosen = self.programs["choose_prompts"](
        rng=rng, history=state.history, ids=prompts.ids, limit=limit
      )
      kept = jax.block_until_ready(chosen)
    rollout = self._timed(
      "roll_out",
      clock="rollout",
      inference_params=params,
      prompts=prompts,
      rng=rng_at(root_key, draw, Stage.ROLLOUT),
      kept=kept,
    )
    with self.clock("reward"):
      graded = grade.grade(
        rollout,
        self._problems,
        self._tokenizer,
        self._grader,
        stop_strings=spec.stop_strings,
        overlong_tokens=spec.overlong_tokens,
      )
    history, draws = self._timed(
      "update_history",
      history=state.history,
      step=state.step,
      draws=state.draws,
      rollout=graded.rollout,
      rewards=graded.rewards,
      correct=graded.correct,
    )
    return state.replace(history=history, draws=draws), Experience(
      prompts=prompts,
      rollout=graded.rollout,
      rewards=graded.rewards,
      num_prompts=np.float32(spec.num_prompts),
      counts=graded.counts,
      samples=graded.samples,
    )

  def _gather_groups(
    self, state: TrainState, params: parameters.Params
  ) -> tuple[TrainState, Experience]:
    """Repeats `_rollout_once` until enough groups have rewards that differ."""
    num_prompts = self._spec.num_prompts
    draws = dynamic_sampling.draws_of_step(
      self._spec.method.dynamic_sampling,
      int(state.step),
      int(state.draws),
      draws_per_epoch=len(self._problems) // num_prompts,
    )
    buffer, limit = None, np.int32(num_prompts)
    counts: collections.Counter = collections.Counter()
    samples: list[dict] = []
    num_groups = 0
    for draw in draws:
      state, chunk = self._rollout_once(state, params, draw, limit)
      counts.update(chunk.counts)
      groups = {
        "prompts": chunk.prompts,
        "rollout": chunk.rollout,
        "rewards": chunk.rewards,
      }
      buffer = buffer or self.programs["init_buffer"](**groups)
      buffer, limit, denominator = self._timed(
        "add_groups", clock="dynamic_sampling", buffer=buffer, **groups
      )
      # Groups whose rewards differ are gathered in order, until it is full.
      differ = np.flatnonzero(np.ptp(chunk.rewards, axis=1)).tolist()
      rows = dict(zip(differ, range(num_groups, num_prompts), strict=False))
      samples += [x | {"row": rows.get(x["row"])} for x in chunk.samples]
      num_groups = int(buffer.num_groups)
      if num_groups == num_prompts:
        break
    return state, Experience(
      prompts=buffer.prompts,
      rollout=buffer.rollout,
      rewards=buffer.rewards,
      num_prompts=denominator,
      counts=counts,
      samples=samples,
    )

  def select(
    self, rng: StepRng, experience: Experience, state: TrainState
  ) -> list[Batch]:
    """Chooses, weights and packs the completions of each update.

    Each update has its own draw, so that its gradient is unbiased given the
    parameters that the earlier ones led to.
    """
    spec, rng = self._spec, rng.at(Stage.COMPLETIONS)
    denominator = np.float32(experience.num_prompts) * spec.group_size
    denominator /= spec.mini_batches
    is_due = self._budget and self._budget.chooses_after(int(state.step))
    batches = []
    for number in range(spec.num_updates):
      args: dict[str, Any] = {
        "rng": rng.draw(number),
        "part": np.int32(number % spec.mini_batches),
        "prompts": experience.prompts,
        "rollout": experience.rollout,
        "rewards": experience.rewards,
      }
      rows, *small = self._timed("select", budget=state.budget, **args)
      num_micro, metrics, summary = jax.device_get(small)
      runtime_checks.check_choice(metrics)
      forecast = None
      if is_due and number < spec.mini_batches:
        forecast = jax.device_get(self._timed("forecast", "budget", **args))
      batches.append(
        Batch(rows, num_micro, denominator, metrics, summary, forecast)
      )
    return batches

  def score(
    self, rng: StepRng, params: parameters.Params, batches: list[Batch]
  ) -> list[Batch]:
    """Computes old log-probabilities and chooses tokens, where needed.

    There is such a stage if the method chooses tokens, or if there are several
    updates on a rollout and the sampler may differ from the policy.

    Args:
      params: weights before the first update on the rollout.
    """
    if "score" not in self.programs:
      return batches
    rng, scored = rng.at(Stage.TOKENS), []
    for number, batch in enumerate(batches):
      rows, metrics = self._timed(
        "score",
        rng=rng.draw(number),
        params=params,
        batch=batch.rows,
        num_micro=batch.num_micro,
      )
      metrics = jax.device_get(metrics)
      runtime_checks.check_choice(metrics)
      scored.append(batch._replace(rows=rows, metrics=batch.metrics | metrics))
    return scored

  def update(
    self,
    state: TrainState,
    reference: parameters.Params | None,
    batches: Sequence[Batch],
  ) -> tuple[TrainState, list[dict[str, Any]]]:
    """Takes an optimizer step on each batch; chooses the next step's budget."""
    updates: list[dict[str, Any]] = []
    if self._budget:
      self._budget.before_update(state, reference, batches[0])
    for number, batch in enumerate(batches):
      state, metrics = self._timed(
        "update",
        state=state,
        reference=reference,
        batch=batch.rows,
        num_micro=batch.num_micro,
        denominator=batch.denominator,
        number=np.int32(number),
      )
      updates.append(jax.device_get(metrics))
      if self._budget and number == 0:
        self._budget.after_update(state)
    if self._budget:
      seconds = self.clock.metrics()
      state = self._budget.choose(state, batches, updates, seconds)
    return state, updates

  def info(
    self,
    state: TrainState,
    experience: Experience,
    batches: Sequence[Batch],
    updates: Sequence[dict[str, Any]],
  ) -> StepInfo:
    """Returns the results of a step that led to `state`; ends its clock."""
    spec, last = self._spec, updates[-1]
    seconds = self.clock.metrics()
    rate = last_learning_rate(
      spec.optimizer.learning_rate,
      int(state.step) * spec.num_updates,
      float(last["update/skipped"]),
    )
    norms = np.array([x["update/grad_norm"] for x in updates])
    is_clipped = norms >= spec.optimizer.clip_norm
    scalars = {
      "update/learning_rate": rate,
      "update/clipped_norm": float(is_clipped.mean()),
      **(self._budget.metrics if self._budget else {}),
      **seconds,
    }
    return StepInfo(experience, batches, updates, spec.mini_batches, scalars)

  def _timed(self, stage: str, clock: str = "", **args) -> Any:
    """Returns the results of a stage, when they are ready."""
    with self.clock(clock or stage):
      return jax.block_until_ready(self.programs[stage](**args))
