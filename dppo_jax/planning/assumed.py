"""A run without weights, data or devices: shapes stand for all three."""

import dataclasses
import json
import pathlib
from typing import Any

import jax
import numpy as np

from dppo_jax import config as configs
from dppo_jax import data, sharding
from dppo_jax.data import sources
from dppo_jax.errors import UserError
from dppo_jax.models import gpu_library
from dppo_jax.models.config import ModelConfig
from dppo_jax.models.hf import families
from dppo_jax.run import preflight, setup

# If the config takes all problems of a source, to train or to evaluate on.
_NUM_PROBLEMS, _NUM_EVAL_PROBLEMS = 8192, 500


def known_models() -> dict[str, dict[str, Any]]:
  """Contents of `config.json` of models on huggingface.co, by id."""
  return json.loads(pathlib.Path(__file__).with_name("models.json").read_text())


def abstract_mesh(
  options: configs.MeshConfig, num_devices: int
) -> jax.sharding.AbstractMesh:
  """Returns the config's mesh over a number of devices that are not present."""
  sizes = sharding.sizes(num_devices, **dataclasses.asdict(options))
  return jax.sharding.AbstractMesh(
    sizes, sharding.MESH_AXES, axis_types=sharding.AXIS_TYPES
  )


def assumed_run(
  config: configs.Config,
  mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh,
  platform: str,
  capability: float = gpu_library.HOPPER,
) -> setup.Run:
  """The run of a config as far as shapes determine it.

  Prompts have room for config.data.max_prompt_tokens tokens and half as many,
  except generated arithmetic problems.

  Args:
    mesh: devices, which may be described or abstract.
    platform: cpu, gpu or tpu.
    capability: compute capability of GPUs.
  Raises:
    UserError: if the run itself would reject the config.
  """
  configs.validate(config)
  preflight.check_training(mesh, config)
  c, model = config, _model(config.model)
  tokenizer = None
  is_random = not (c.model.path or c.model.hub_id)
  if is_random and data.arithmetic.is_source(c.data.train):
    tokenizer = data.CharacterTokenizer()
    train_set, eval_sets = setup.read_problems(c, tokenizer, c.data.eval)
  else:
    width = sharding.round_up(c.data.max_prompt_tokens, 8)
    train_set = _problems(_NUM_PROBLEMS, width)
    eval_set = _problems(c.data.eval_limit or _NUM_EVAL_PROBLEMS, width)
    eval_sets = dict.fromkeys(sources.parse_named(c.data.eval), eval_set)
  return setup.make_run(
    c, mesh, platform, "", tokenizer, model, train_set, eval_sets, capability
  )


def _problems(num: int, width: int) -> data.ProblemSet:
  texts = ("",) * num
  return data.ProblemSet(
    names=texts,
    problems=texts,
    answers=texts,
    solutions=texts,
    columns={},
    tokens=np.broadcast_to(np.int32(0), (num, width)),
    lengths=np.full(num, width // 2, np.int32),
    first_prompt="",
    report="",
  )


def _model(options: configs.ModelConfig) -> ModelConfig:
  """Architecture of a model from its config.json, without its weights."""
  if options.path or not options.hub_id:
    vocab = data.CharacterTokenizer().vocab_size
    return setup.describe_model(options, options.path, vocab)
  models = known_models()
  if options.hub_name not in models:
    raise UserError(
      f"config.model.hub_id is {options.hub_id!r} but --mode=plan knows only "
      f"{', '.join(models)}: set config.model.path to a directory with its "
      "config.json (weights are not needed)"
    )
  settings = models[options.hub_name]
  return families.from_settings(settings, options.dtype, options.remat)
