"""What no run can work with, refused before it starts."""

import dataclasses

from dppo_jax import rewards
from dppo_jax.config.choose import make_method, make_objective
from dppo_jax.config.options import check_range, shown, walk
from dppo_jax.config.schema import Config
from dppo_jax.metrics import trackers


def validate(config: Config) -> None:
  """Refuses values that cannot work, naming value, limit and option.

  Raises:
    ValueError: for the first that is found.
  """
  for field in dataclasses.fields(config):
    section = getattr(config, field.name)
    if dataclasses.is_dataclass(field.type) and not isinstance(
      section, field.type
    ):
      raise ValueError(
        f"config.{field.name} is {shown(section)} but must be a "
        f"{field.type.__name__}: set its options, as config.{field.name}.OPTION"
      )
  for name, value, metadata in walk(config):
    check_range(name, value, metadata)
    if name.endswith(".factory") and not callable(value):
      raise ValueError(
        f"config.{name} is {shown(value)} but must be a function: name it, as "
        "in --config=FILE.py:METHOD,OBJECTIVE"
      )
  make_method(config)
  make_objective(config)
  rewards.parse(config.reward.functions)
  trackers.parse(config.log.writers)
  m, ramp = config.model, config.reward.overlong_tokens
  if ramp > config.rollout.max_tokens:
    raise ValueError(
      f"config.reward.overlong_tokens is {ramp} but must be at most "
      f"config.rollout.max_tokens, {config.rollout.max_tokens}"
    )
  prompts, parts = config.data.prompts_per_step, config.objective.mini_batches
  if prompts % parts:
    raise ValueError(
      f"config.data.prompts_per_step is {prompts} but must be a multiple of "
      f"config.objective.mini_batches, {parts}"
    )
  if config.pack.row_length % 8:
    raise ValueError(
      f"config.pack.row_length is {config.pack.row_length} but must be a "
      "multiple of 8"
    )
  if config.mesh.data == 0:
    raise ValueError("config.mesh.data is 0 but must be at least 1, or -1")
  if m.heads % m.kv_heads:
    raise ValueError(
      f"config.model.heads is {m.heads} but must be a multiple of "
      f"config.model.kv_heads, {m.kv_heads}"
    )
  if m.head_dim % 2:
    raise ValueError(f"config.model.head_dim is {m.head_dim} but must be even")
