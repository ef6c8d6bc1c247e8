"""Validates combinations of options before any array is allocated.

Each function raises UserError. The range of a single option is checked by
`config.validate`.
"""

from collections.abc import Sequence

import jax

from dppo_jax import config as configs
from dppo_jax import data, distributed, sharding
from dppo_jax.errors import UserError
from dppo_jax.files import bucket, user_code
from dppo_jax.models import lora, parameters
from dppo_jax.models.config import ModelConfig
from dppo_jax.rollout import Sampling
from dppo_jax.run import checkpoint, checkpoint_steps
from dppo_jax.step import abstract_values
from dppo_jax.step.spec import StepSpec


def check_ids(
  sampling: Sampling, vocab: int, problem_sets: Sequence[data.ProblemSet]
) -> None:
  """Checks that the vocabulary contains all token ids."""
  if sampling.top_k > vocab:
    raise UserError(
      f"config.rollout.top_k is {sampling.top_k} but the vocabulary has "
      f"{vocab} tokens"
    )
  stop_ids = sampling.stop_ids
  if not 0 <= min(stop_ids) <= max(stop_ids) < vocab:
    raise UserError(
      f"the stop ids {stop_ids} are not all in 0..{vocab - 1}, the model's "
      "vocabulary: set config.rollout.stop_ids"
    )
  largest = max((int(x.tokens.max()) for x in problem_sets), default=0)
  if largest >= vocab:
    raise UserError(
      f"a prompt has token {largest} but the model's vocabulary size is "
      f"{vocab}: config.model.path holds the tokenizer of another model"
    )


def check_training(mesh: jax.sharding.Mesh, config: configs.Config) -> None:
  """Checks the options that only training depends on.

  The devices must divide the prompts of a step.
  """
  if not config.data.train:
    raise UserError("config.data.train is empty: name a source to train on")
  prompts = config.data.prompts_per_step
  num_shards = sharding.num_shards(mesh, "batch")
  if prompts % num_shards:
    raise UserError(
      f"config.data.prompts_per_step is {prompts} but must be a multiple of "
      f"the {num_shards} devices of config.mesh.data x config.mesh.replicas"
    )


def check_start(from_run: str, spec: StepSpec) -> None:
  """Checks that `config.sft.from_run` has a checkpoint of all weights."""
  workdir, step = checkpoint_steps.split_step(from_run)
  checkpoint_steps.find(workdir, step, "config.sft.from_run")
  if checkpoint.has_adapters(workdir):
    raise UserError(
      f"config.sft.from_run: {bucket.shown(workdir)} has adapters: export it "
      "and name the directory in config.model.path"
    )
  like = abstract_values.abstract_params(spec.without_adapters())
  with checkpoint.Checkpoints(workdir, read_only=True) as checkpoints:
    checkpoints.check_shapes(step, "params", like)


def check_optimizer(spec: StepSpec) -> None:
  """Checks that an update has the shapes of the weights and keeps the state."""
  init, update, *_ = spec.optimizer
  params = lora.trainable(abstract_values.abstract_params(spec))
  label = "config.optimizer.function: an update must have the shapes and dtypes"
  with user_code.explained(f"{label} of the weights, and keep the state's"):
    jax.eval_shape(lambda x: update(x, init(x), x), params)


def check_processes(mesh: jax.sharding.Mesh) -> None:
  """Checks that every process has a device in the mesh."""
  present = {device.process_index for device in mesh.devices.flat}
  if absent := set(range(distributed.count())) - present:
    raise UserError(
      f"the mesh of {mesh.size} devices has none of process "
      f"{', '.join(map(str, sorted(absent)))}: config.mesh.data=-1 uses all"
    )


def check_weights(mesh: jax.sharding.Mesh, model: ModelConfig) -> None:
  """Checks that the mesh divides the weights; few key-value heads repeat."""
  for name, param in parameters.parameter_table(model).items():
    for size, axis in zip(param.shape, param.axes, strict=True):
      num_shards = sharding.num_shards(mesh, axis)
      if axis != "kv_heads" and size % num_shards:
        (mesh_axis,) = sharding.RULES[axis]
        raise UserError(
          f"config.mesh.{mesh_axis} is {num_shards} but the {axis} axis of "
          f"{name}, {size}, is not a multiple of it"
        )
