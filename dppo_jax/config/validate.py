"""Checks of option values before a run starts."""

from dppo_jax import rewards
from dppo_jax.config.choose import make_method, make_objective
from dppo_jax.config.options import check_option, walk
from dppo_jax.config.schema import TINY, Config
from dppo_jax.errors import UserError
from dppo_jax.metrics import trackers


def validate(config: Config) -> None:
  """Checks every option, and those that depend on each other.

  Raises:
    UserError: naming value, limit and option.
  """
  for name, value, metadata in walk(config):
    if metadata:  # not a factory
      check_option(name, value, metadata)
  make_method(config)
  make_objective(config)
  rewards.parse(config.reward.functions)
  trackers.parse(config.log.writers)
  _check_shape(config.model.shape)
  ramp, limit = config.reward.overlong_tokens, config.rollout.max_tokens
  if ramp > limit:
    raise UserError(
      f"config.reward.overlong_tokens is {ramp} but must be at most "
      f"config.rollout.max_tokens, {limit}"
    )
  prompts, parts = config.data.prompts_per_step, config.objective.mini_batches
  if prompts % parts:
    raise UserError(
      f"config.data.prompts_per_step is {prompts} but must be a multiple of "
      f"config.objective.mini_batches, {parts}"
    )
  if config.pack.row_length % 8:
    raise UserError(
      f"config.pack.row_length is {config.pack.row_length} but must be a "
      "multiple of 8"
    )
  if config.mesh.data == 0:
    raise UserError("config.mesh.data is 0 but must be at least 1, or -1")


def _check_shape(shape: dict[str, int]) -> None:
  if shape.keys() != TINY.keys():
    raise UserError(
      f"config.model.shape has {', '.join(shape)} but must have "
      f"{', '.join(TINY)}"
    )
  for name, size in shape.items():
    least = {"heads": shape["kv_heads"], "head_dim": 2}.get(name, 1)
    if type(size) is not int or size < 1 or size % least:
      raise UserError(
        f"config.model.shape.{name} is {size!r} but must be a positive "
        f"multiple of {least}"
      )
