"""A run of which nothing has been read: shapes stand for weights and data."""

import dataclasses

import jax

from dppo_jax import config as configs
from dppo_jax import data, sharding
from dppo_jax.models import attention
from dppo_jax.planning import architectures
from dppo_jax.run import preflight, setup

NUM_PROBLEMS = 8192  # where the config takes all of a source


def abstract_mesh(
  options: configs.MeshConfig, num_devices: int
) -> jax.sharding.AbstractMesh:
  """The mesh that a config makes of so many devices, none of which is there.

  Raises:
    ValueError: where it needs more.
  """
  sizes = sharding.sizes(num_devices, **dataclasses.asdict(options))
  return jax.sharding.AbstractMesh(
    sizes, sharding.MESH_AXES, axis_types=sharding.AXIS_TYPES
  )


def assumed_run(
  config: configs.Config,
  mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh,
  platform: str,
) -> setup.Run:
  """The run of a config, as far as shapes go.

  Prompts are as wide as config.data.max_prompt_tokens allows, except those of
  arithmetic, which are made.

  Args:
    mesh: of devices that need not be there, or of none.
    platform: cpu, gpu or tpu.
  Raises:
    ValueError: for whatever cannot work, naming value, limit and option.
  """
  model = architectures.find(config.model)
  if model is None and config.data.train == data.problems.ARITHMETIC:
    return setup.setup_run(config, mesh, platform)
  configs.validate(config)
  preflight.check_dynamic_sampling(config)
  preflight.check_prompts(mesh, config)
  backend = attention.choose_backend(
    config.model.attention,
    platform,
    config.pack.row_length,
    config.rollout.group_size,
    share_prefix=True,
  )
  if model is None:
    size = data.CharacterTokenizer().vocab_size
    model = setup.describe_model(config.model, "", size)
  model = dataclasses.replace(model, attention=backend)
  preflight.check_weights(mesh, model)
  width = sharding.round_up(config.data.max_prompt_tokens, 8)
  num = config.data.train_limit or NUM_PROBLEMS
  problems = data.ProblemSet.of_shape(num, width)
  preflight.check_lengths(config, width)
  return setup.assemble(
    config,
    mesh,
    model,
    platform=platform,
    tokenizer=None,
    stop_ids=tuple(config.rollout.stop_ids) or (0,),
    train_set=problems,
    eval_sets={"eval": problems} if config.data.eval else {},
    initial_params=None,
  )
