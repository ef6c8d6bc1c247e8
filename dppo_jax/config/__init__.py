"""What a run is told: its options, how they are chosen, checked and read."""

from dppo_jax.config.choose import make_method, make_objective, use_method
from dppo_jax.config.options import default_args, walk
from dppo_jax.config.running import Checkpoint, Log, Mesh, Pack, Rollout
from dppo_jax.config.saved import read
from dppo_jax.config.schema import (
  Config,
  Data,
  Eval,
  Method,
  Model,
  Objective,
  Optimizer,
  Reward,
  Sft,
)
from dppo_jax.config.validate import validate

__all__ = [
  "Checkpoint",
  "Config",
  "Data",
  "Eval",
  "Log",
  "Mesh",
  "Method",
  "Model",
  "Objective",
  "Optimizer",
  "Pack",
  "Reward",
  "Rollout",
  "Sft",
  "default_args",
  "make_method",
  "make_objective",
  "read",
  "use_method",
  "validate",
  "walk",
]
