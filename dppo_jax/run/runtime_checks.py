"""Run-time checks that stop training: invalid probabilities, bad weights."""

import jax
import jax.numpy as jnp
import numpy as np

from dppo_jax.errors import UserError
from dppo_jax.models import transformer

MAX_SKIPPED = 10  # updates in a row with a non-finite gradient


def check_selection(values: dict[str, np.ndarray]) -> None:
  """Raises if a batch cannot be trained on with the weights it has."""
  if values.get("pack/unplaced", 0) > 0:
    raise RuntimeError(
      f"{values['pack/unplaced']:.0f} completions have no place in the packed "
      "rows: packing.row_bound is wrong; please report this"
    )
  for name, items in (
    ("weights/invalid_probs", "prompts or completions"),
    ("tokens/invalid_probs", "tokens"),
  ):
    if values.get(name, 0) > 0:
      raise UserError(
        f"{values[name]:.0f} {items} were kept with a probability outside "
        "(0, 1]: the rules of config.method must report the probabilities "
        "with which they draw"
      )


def check_update(step: int, values: dict[str, float]) -> None:
  """Raises UserError if it is pointless to continue or to save.

  Args:
    step: step of the update.
    values: metrics of the update.
  """
  if values["update/nonfinite_params"]:
    raise UserError(
      f"the update of step {step} made {values['update/nonfinite_params']:.0f} "
      "weights infinite or NaN; they are not saved, and the latest checkpoint "
      "is unchanged. Start another run with a lower "
      "config.optimizer.learning_rate; config.sft.from_run=RUN@STEP starts "
      "from the weights of a checkpoint"
    )
  if values["update/skipped_in_a_row"] >= MAX_SKIPPED:
    raise UserError(
      f"the gradients of {MAX_SKIPPED} updates in a row were not finite (norm "
      f"{values['update/grad_norm']}, loss {values['update/loss']}, largest "
      f"weight {values['weights/max']:.1f}), so these updates changed nothing. "
      "Lower config.optimizer.learning_rate, or compute in float32 with "
      "config.model.dtype"
    )


def check_params(params: transformer.Params, advice: str) -> None:
  """Raises UserError, with `advice`, if a weight is not finite."""
  for name, count in transformer.flatten(
    jax.device_get(_count_nonfinite(params))
  ).items():
    if count:
      raise UserError(
        f"{count} values of the weight {name} are infinite or NaN: {advice}"
      )


@jax.jit
def _count_nonfinite(params: transformer.Params) -> transformer.Params:
  return jax.tree.map(lambda x: jnp.sum(~jnp.isfinite(x)), params)
