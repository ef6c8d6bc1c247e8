"""What a run does not go on with: checked while it runs, told in one line."""

import jax
import jax.numpy as jnp
import numpy as np

from dppo_jax.models import transformer
from dppo_jax.step import update


def check_selection(values: dict[str, np.ndarray]) -> None:
  """Refuses to train on a batch that is not what its weights say."""
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
      raise ValueError(
        f"{values[name]:.0f} {items} were kept with a probability that is not "
        "in (0, 1]: the rules of config.method must report the probabilities "
        "with which they draw"
      )


def check_update(step: int, values: dict[str, float]) -> None:
  """Refuses to go on, and to save, where that would be in vain.

  Args:
    values: metrics of the update of `step`.
  Raises:
    FloatingPointError: for weights that are not finite, or a gradient that
      has not been for too long.
  """
  if values["update/nonfinite_params"]:
    raise FloatingPointError(
      f"the update of step {step} made {values['update/nonfinite_params']:.0f} "
      "weights infinite or NaN: they are not saved, the newest checkpoint is "
      "as it was. Start another run with a lower "
      "config.optimizer.learning_rate; config.sft.from_run=RUN@STEP takes the "
      "weights of a checkpoint"
    )
  if values["update/skipped_in_a_row"] >= update.MAX_SKIPPED:
    raise FloatingPointError(
      f"the gradient of {update.MAX_SKIPPED} updates in a row was not finite "
      f"(norm {values['update/grad_norm']}, loss {values['update/loss']}, "
      f"largest weight {values['weights/max']:.1f}): nothing was changed by "
      "them. Lower config.optimizer.learning_rate, or compute in float32 "
      "with config.model.dtype"
    )


def check_params(params: transformer.Params, what: str) -> None:
  """Refuses weights that are not finite.

  Args:
    what: where they are from, and what to do about them.
  Raises:
    FloatingPointError: it names the first of them.
  """
  counts = jax.device_get(_count_nonfinite(params))
  for name, count in transformer.flatten(counts).items():
    if count:
      raise FloatingPointError(
        f"{count} values of the weight {name} are infinite or NaN: {what}"
      )


@jax.jit
def _count_nonfinite(params: transformer.Params) -> transformer.Params:
  return jax.tree.map(lambda x: jnp.sum(~jnp.isfinite(x)), params)
