"""Run-time checks that stop training: invalid probabilities, NaN weights."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from dppo_jax.errors import UserError
from dppo_jax.models import parameters

MAX_SKIPPED = 10  # updates in a row with a non-finite gradient


def check_choice(metrics: Mapping[str, float]) -> None:
  """Raises if completions have no row, or items no probability in (0, 1]."""
  if (num := metrics.get("pack/unplaced", 0)) > 0:
    raise RuntimeError(
      f"{num:.0f} completions have no place in the packed rows: "
      "packing.row_bound is wrong; please report this"
    )
  items = {"weights": "prompts or completions", "tokens": "tokens"}
  for kind, words in items.items():
    if (num := metrics.get(f"{kind}/invalid_probs", 0)) > 0:
      raise UserError(
        f"{num:.0f} {words} were kept with a probability outside (0, 1]: the "
        "rules of config.method must report the probabilities with which they "
        "draw"
      )


def check_update(step: int, metrics: Mapping[str, float]) -> None:
  """Raises UserError for a run that diverged, before it saves its weights."""
  if num := metrics["update/nonfinite_params"]:
    raise UserError(
      f"the update of step {step} made {num:.0f} weights infinite or NaN: they "
      "are not saved. Start another run with a lower "
      "config.optimizer.learning_rate; config.sft.from_run=RUN@STEP takes the "
      "weights of a checkpoint"
    )
  if metrics["update/skipped_in_a_row"] >= MAX_SKIPPED:
    raise UserError(
      f"the gradient of {MAX_SKIPPED} updates in a row was not finite "
      f"(norm {metrics['update/grad_norm']}, loss {metrics['update/loss']}, "
      f"largest weight {metrics['weights/max']:.1f}): lower "
      "config.optimizer.learning_rate, or compute in float32 with "
      "config.model.dtype"
    )


def check_params(params: parameters.Params, advice: str) -> None:
  """Raises UserError, which ends in `advice`, if a weight is not finite."""
  counts = jax.device_get(_count_nonfinite(params))
  for name, count in parameters.flatten(counts).items():
    if count:
      raise UserError(
        f"{count} values of the weight {name} are infinite or NaN: {advice}"
      )


@jax.jit
def _count_nonfinite(params: parameters.Params) -> parameters.Params:
  return jax.tree.map(lambda x: jnp.sum(~jnp.isfinite(x)), params)
