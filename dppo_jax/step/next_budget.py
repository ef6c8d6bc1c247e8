"""The budget of the next step, from what the last one measured."""

from collections.abc import Callable, Mapping, Sequence
import math
from typing import Any

import jax
import numpy as np

from dppo_jax import distributed, sharding
from dppo_jax.methods.neyman import budget as budgets
from dppo_jax.methods.neyman import gradient_noise
from dppo_jax.records import TrainState
from dppo_jax.rng import Stage, rng_at
from dppo_jax.step.optimizer import momentum_decay
from dppo_jax.step.spec import StepSpec
from dppo_jax.step.step_info import Batch

EVERY = 4  # steps between measurements of the noise, and first choices
CHOOSE_EVERY = 16  # steps between later choices
SIGNS_EVERY = 128  # steps between backward passes with random signs
# Fraction of the batch's noise between the completions of a prompt, until it is
# measured.
UNKNOWN_WITHIN = 0.5


class NextBudget:
  """Measures the gradient noise, and asks the method's policy.

  Args:
    run: `(stage, **args) -> results`, runs a compiled stage of the step.
  Attributes:
    metrics: scalars to log of the last step.
  """

  def __init__(self, spec: StepSpec, run: Callable[..., Any]):
    self._spec, self._run = spec, run
    self._policy = spec.method.budget.policy()
    self._decay = momentum_decay(spec.optimizer)
    self.metrics: dict[str, float] = {}
    places = sharding.sharding(spec.mesh)
    self._place = jax.jit(lambda x: x, out_shardings=places)

  def chooses_after(self, step: int) -> bool:
    """True for the steps, counted from 0, with a forecast and a choice."""
    return step % (EVERY if step < CHOOSE_EVERY else CHOOSE_EVERY) == 1

  def before_update(self, state: TrainState, reference, batch: Batch) -> None:
    """Measures what the first update on a rollout changes.

    Measurements that are not due are NaN: the squared norm of the momentum
    before and after, and the result of `update.signed_square`.
    """
    step = int(state.step)
    self._before = self._after = self._signs = math.nan
    if step % EVERY == 1:
      self._before = self._square(state)
    if step % SIGNS_EVERY == 1:
      signs = self._run(
        "signed_square",
        rng=rng_at(self._spec.root_key, step, Stage.NOISE),
        params=state.params,
        reference=reference,
        batch=batch.rows,
        num_micro=batch.num_micro,
      )
      self._signs = float(signs)

  def after_update(self, state: TrainState) -> None:
    """Measures what the first update has changed."""
    if math.isfinite(self._before):
      self._after = self._square(state)

  def choose(
    self,
    state: TrainState,
    batches: Sequence[Batch],
    updates: Sequence[dict[str, Any]],
    seconds: Mapping[str, float],
  ) -> TrainState:
    """Returns the state with new estimates and the budget of the next step.

    Args:
      batches, updates: of the step that led to `state`.
      seconds: of the stages of the step so far, as metrics. All processes use
        the first one's.
    """
    spec, passes = self._spec, self._spec.inner_updates
    noise = self._add(jax.device_get(state.noise), batches[0], updates)
    fraction = gradient_noise.noise_fraction(noise, passes) / passes
    metrics = distributed.gather(dict(seconds))[0]
    metrics |= {
      "step": int(state.step),
      "budget/completions": float(state.budget),
      "update/micro_batches": sum(float(x.num_micro) for x in batches) / passes,
      "noise/fraction": max(fraction, gradient_noise.MIN_NOISE_FRACTION),
    }
    predicted = self._predict(noise, batches)
    budget, chosen = self._policy(metrics, *predicted)
    num_prompts = spec.num_prompts // spec.mini_batches
    added = np.mean([_added(noise, x) for x in batches])
    self.metrics = {
      **gradient_noise.describe(noise, num_prompts),
      "budget/added_variance": float(added),
      "budget/completions": metrics["budget/completions"],
      **chosen,
    }
    noise, budget = self._place((noise, np.float32(budget)))
    return state.replace(noise=noise, budget=budget)

  def _predict(
    self, noise: gradient_noise.Noise, batches: Sequence[Batch]
  ) -> list[np.ndarray]:
    """Returns added variance and micro-batches of all fractions, if due."""
    forecasts = [x.forecast for x in batches if x.forecast]
    # Without a completion to train on, nothing is learned about budgets.
    if not any(np.any(x.rows) for x in forecasts):
      return []
    added = np.mean([x.added_variance for x in forecasts], axis=0)
    within = gradient_noise.within_fraction(noise)
    rows = np.stack([x.rows for x in forecasts])
    return [
      np.where(added > 0, within * np.maximum(added, 1e-9), 0.0),
      budgets.expected_micro_batches(rows, self._spec.packing.rows_per_micro),
    ]

  def _add(
    self,
    noise: gradient_noise.Noise,
    first: Batch,
    updates: Sequence[dict[str, Any]],
  ) -> gradient_noise.Noise:
    """Returns the estimates of the noise after the updates of a step."""
    clip_norm = self._spec.optimizer.clip_norm
    norms = [float(x["update/grad_norm"]) for x in updates]
    # What is not finite does not reach the momentum.
    kept = [
      min(clip_norm / max(x, 1e-30), 1.0) for x in norms if math.isfinite(x)
    ]
    if len(kept) == len(norms):
      squared, added = norms[0] ** 2, _added(noise, first)
      product = gradient_noise.product_with_momentum(
        self._before, self._after, kept[0] * norms[0], self._decay
      )
      noise = gradient_noise.add_gradient(
        noise, squared, product / kept[0], added
      )
      if math.isfinite(self._signs):
        within = self._signs * float(first.forecast.sum_squares)
        within /= float(first.denominator) ** 2
        noise = gradient_noise.add_signs(noise, squared, within, added)
    for x in kept:
      noise = gradient_noise.add_momentum(noise, self._decay, x)
    return noise

  def _square(self, state: TrainState) -> float:
    return float(self._run("momentum_square", opt_state=state.opt_state))


def _added(noise: gradient_noise.Noise, batch: Batch) -> float:
  """Returns the variance that a choice added, over the batch's noise."""
  within = gradient_noise.within_fraction(noise, UNKNOWN_WITHIN)
  return within * float(batch.metrics["budget/added_variance"])
