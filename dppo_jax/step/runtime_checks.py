"""Run-time checks that stop training: invalid probabilities, NaN weights."""

import jax
import jax.numpy as jnp

from dppo_jax.errors import UserError
from dppo_jax.models import parameters

MAX_SKIPPED = 10  # updates in a row with a non-finite gradient


def check_selection(num_unplaced: float, num_invalid_probs: float) -> None:
  """Raises if completions have no row, or items no probability in (0, 1]."""
  if num_unplaced > 0:
    raise RuntimeError(
      f"{num_unplaced:.0f} completions have no place in the packed rows: "
      "packing.row_bound is wrong; please report this"
    )
  check_tokens(num_invalid_probs, "prompts or completions")


def check_tokens(num_invalid_probs: float, items: str = "tokens") -> None:
  """Raises if tokens were kept with a probability outside (0, 1]."""
  if num_invalid_probs > 0:
    raise UserError(
      f"{num_invalid_probs:.0f} {items} were kept with a probability outside "
      "(0, 1]: the rules of config.method must report the probabilities with "
      "which they draw"
    )


def check_update(
  step: int,
  num_nonfinite_params: float,
  num_skipped_in_a_row: float,
  details: str,
) -> None:
  """Raises UserError for a run that diverged, before it saves its weights.

  Args:
    num_nonfinite_params: weights that are infinite or NaN.
    num_skipped_in_a_row: consecutive updates with a non-finite gradient.
    details: numbers that describe the update.
  """
  if num_nonfinite_params:
    raise UserError(
      f"the update of step {step} made {num_nonfinite_params:.0f} weights "
      "infinite or NaN: they are not saved. Start another run with a lower "
      "config.optimizer.learning_rate; config.sft.from_run=RUN@STEP takes the "
      "weights of a checkpoint"
    )
  if num_skipped_in_a_row >= MAX_SKIPPED:
    raise UserError(
      f"the gradient of {MAX_SKIPPED} updates in a row was not finite "
      f"({details}): lower config.optimizer.learning_rate, or compute in "
      "float32 with config.model.dtype"
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
