"""Options of a run: definitions, checks, files and command line."""

from dppo_jax.config.choose import (
  load_callbacks,
  load_optimizer,
  make_method,
  make_objective,
  read,
  use_method,
  user_functions,
  validate,
)
from dppo_jax.config.options import (
  absolute_paths,
  assign,
  default_args,
  flatten,
  walk,
)
from dppo_jax.config.schema import (
  Config,
  LoraConfig,
  MeshConfig,
  MethodConfig,
  ModelConfig,
  ObjectiveConfig,
  SftConfig,
)
