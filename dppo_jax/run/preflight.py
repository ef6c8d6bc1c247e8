"""Validates combinations of options before any array is allocated.

The range of a single option is checked by `config.validate`.
"""

import jax

from dppo_jax import config as configs
from dppo_jax import data, sharding
from dppo_jax.errors import UserError
from dppo_jax.models import transformer
from dppo_jax.run import checkpoint, distributed


def check_lengths(config: configs.Config, prompt_length: int) -> None:
  """Raises UserError if a sequence may be longer than a row."""
  longest = prompt_length + config.rollout.max_tokens - 1
  if longest > config.pack.row_length:
    raise UserError(
      f"a prompt of {prompt_length} tokens and a completion of "
      f"{config.rollout.max_tokens} take {longest} tokens but a packed row "
      f"holds {config.pack.row_length}: raise config.pack.row_length, or "
      "lower config.rollout.max_tokens or config.data.max_prompt_tokens"
    )


def check_train_set(config: configs.Config, train_set: data.ProblemSet) -> None:
  """Raises UserError if problems are too long, too few or lack solutions."""
  d = config.data
  check_lengths(config, train_set.tokens.shape[1])
  if len(train_set) < d.prompts_per_step:
    raise UserError(
      f"config.data.prompts_per_step is {d.prompts_per_step} but {d.train} has "
      f"{len(train_set)} usable problems"
    )
  if config.sft.needs_solutions and not any(train_set.solutions):
    raise UserError(
      f"config.sft.steps is {config.sft.steps} but no problem of {d.train} "
      "has a solution to imitate: add a column 'solution', or set "
      "config.sft.steps to 0"
    )


def check_ids(
  model: transformer.ModelConfig,
  stop_ids: tuple[int, ...],
  problem_sets: list[data.ProblemSet],
) -> None:
  """Raises UserError for token ids outside the model's vocabulary."""
  for stop_id in stop_ids:
    if type(stop_id) is not int or not 0 <= stop_id < model.vocab:
      raise UserError(
        f"the stop id {stop_id!r} is not below the model's vocabulary size "
        f"{model.vocab}: set config.rollout.stop_ids"
      )
  largest = max((int(x.tokens.max()) for x in problem_sets), default=0)
  if largest >= model.vocab:
    raise UserError(
      f"a prompt has token {largest} but the model's vocabulary size is "
      f"{model.vocab}: config.model.path holds the tokenizer of another model"
    )


def check_dynamic_sampling(config: configs.Config) -> None:
  """Raises UserError if skipped groups would count in exact sampling."""
  sampling = configs.make_method(config).dynamic_sampling
  if not (sampling and sampling.is_exact):
    return
  for name, value in {
    "config.reward.overlong_tokens": config.reward.overlong_tokens,
    "config.objective.args.beta": configs.make_objective(config).beta,
  }.items():
    if value:
      raise UserError(
        f"{name} is {value} but exact dynamic sampling skips groups of equal "
        "rewards, which would then have a gradient: set it to 0, or "
        "config.method.args.dynamic_sampling to plain or none"
      )
  if config.objective.args.get("tokens_per_completion") == 0:
    raise UserError(
      "config.objective.args.tokens_per_completion is 0 but the groups that "
      "exact dynamic sampling gathers are not of average length: set it to "
      "the usual length of a completion"
    )


def check_from_run(from_run: str) -> None:
  """Raises UserError if the checkpoint to start from does not exist."""
  workdir, step = checkpoint.split_step(from_run)
  steps = checkpoint.complete_steps(workdir)
  if step not in steps:
    raise UserError(
      f"config.sft.from_run is {from_run} but {workdir} has no checkpoint of "
      f"step {step}; available: {', '.join(map(str, steps)) or 'none'}"
    )


def check_prompts(mesh: jax.sharding.Mesh, config: configs.Config) -> None:
  """Raises UserError if prompts cannot be divided over the mesh."""
  prompts = config.data.prompts_per_step
  num_shards = sharding.num_shards(mesh, "batch")
  if prompts % num_shards:
    replicas = " x config.mesh.replicas" if config.mesh.replicas > 1 else ""
    raise UserError(
      f"config.data.prompts_per_step is {prompts} but must be a multiple of "
      f"the {num_shards} devices of config.mesh.data{replicas}"
    )


def check_processes(mesh: jax.sharding.Mesh) -> None:
  """Raises UserError if a process has no device in the mesh."""
  present = {device.process_index for device in mesh.devices.flat}
  absent = set(range(distributed.count())) - present
  if absent:
    raise UserError(
      f"a mesh of {mesh.size} devices has none of process "
      f"{', '.join(map(str, sorted(absent)))}: config.mesh.data=-1 uses all"
    )


def check_weights(
  mesh: jax.sharding.Mesh, model: transformer.ModelConfig
) -> None:
  """Raises UserError if a weight cannot be divided over the mesh.

  There may be fewer heads of keys and values than devices: they are repeated.
  """
  for name, param in transformer.parameter_table(model).items():
    for size, axis in zip(param.shape, param.axes, strict=True):
      num_shards = sharding.num_shards(mesh, axis)
      if axis != "kv_heads" and size % num_shards:
        (mesh_axis,) = sharding.RULES[axis]
        raise UserError(
          f"config.mesh.{mesh_axis} is {num_shards} but the {axis} axis of "
          f"{name}, {size}, is not a multiple of it"
        )
