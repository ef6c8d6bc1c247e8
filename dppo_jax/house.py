"""What a run is made of before its first step, checked at the door."""

from collections.abc import Callable
import dataclasses
import functools
import pathlib
from typing import NamedTuple

import jax
import optax

from dppo_jax import batch as batches
from dppo_jax import (
  buckets,
  data,
  keys,
  rewards,
  sharding,
  sources,
  tokenizer,
  update,
)
from dppo_jax import config as configs
from dppo_jax.algo import objectives
from dppo_jax.methods import Method
from dppo_jax.models import checkpoint_hf, kernels, transformer


class House(NamedTuple):
  """Everything that the rooms of a step share.

  Attributes:
    root_key: where all randomness starts.
    held_out: problems to evaluate on, if any.
    initial_params: makes the weights to start from, placed on the mesh.
    rows: the shape of packed rows.
  """

  config: configs.Config
  mesh: jax.sharding.Mesh
  root_key: jax.Array
  method: Method
  objective: objectives.Objective
  optimizer: optax.GradientTransformation
  tokenizer: tokenizer.Tokenizer
  stop_ids: tuple[int, ...]
  train: data.ProblemSet
  held_out: data.ProblemSet | None
  model: transformer.ModelConfig
  initial_params: Callable[[], transformer.Params]
  rows: batches.Rows

  def make_grader(self) -> rewards.Grader:
    """The grader that the config asks for, not yet started."""
    r = self.config.reward
    return rewards.Grader(
      r.kind, r.num_workers, r.timeout_seconds, r.format_reward
    )

  def description(self) -> str:
    """The batch arithmetic of a step, and what was read."""
    c = self.config
    prompts, group = c.data.prompts_per_step, c.rollout.group_size
    longest = self.train.tokens.shape[1] + c.rollout.max_tokens - 1
    worst = self.rows.count(prompts * group, longest) // self.rows.per_micro
    epoch = len(self.train) // prompts
    return "\n".join(
      [
        f"model: {self.model.family}, {self.model.layers} layers of width "
        f"{self.model.embed}, {transformer.num_parameters(self.model):,} "
        f"parameters, {self.model.dtype}; "
        f"mesh {' x '.join(map(str, self.mesh.devices.shape))}",
        self.train.report,
        self.held_out.report if self.held_out else "eval: no problems",
        f"step: {prompts} prompts x {group} completions = "
        f"{prompts * group} sequences of at most {longest} cells "
        f"(prompt {self.train.tokens.shape[1]}, completion "
        f"{c.rollout.max_tokens}), decoded in {c.rollout.num_slots} slots",
        f"update: micro-batches of {self.rows.per_micro} rows x "
        f"{self.rows.length} cells = {self.rows.per_micro * self.rows.length:,}"
        f" tokens, at most {worst} of them, {c.objective.inner_updates} "
        "update(s) on each rollout",
        f"epoch: {epoch} steps; {len(self.train) - epoch * prompts} prompts "
        "sit out, others each time",
        f"method: {c.method.name} {c.method.args or ''}, objective "
        f"{c.objective.name} {c.objective.args or ''}, {c.steps} steps",
      ]
    )


def furnish(config: configs.Config) -> House:
  """Checks the config and gathers what a run needs.

  Raises:
    ValueError: for whatever cannot work, naming value, limit and knob.
  """
  configs.validate(config)
  _check_refill(config)
  mesh = sharding.make_mesh(config.mesh.data, config.mesh.model)
  check_batches(mesh, config)
  root_key = jax.random.key(config.seed)
  path = config.model.path
  if not path and config.model.hub_id:
    path = checkpoint_hf.fetch(config.model.hub_id)
  if path:
    checkpoint_hf.check(path)
  words = _tokenizer(config, path)
  model = _model(config.model, path, words.vocab_size, _attention(config))
  check_weights(mesh, model)
  _check_from_run(config.warmup.from_run)
  train, held_out = _problems(config, words)
  stop_ids = tuple(config.rollout.stop_ids) or words.stop_ids
  _check_ids(model, stop_ids, [train, *([held_out] if held_out else [])])
  where = transformer.shardings(model, mesh)

  def initial_params() -> transformer.Params:
    if path:
      return checkpoint_hf.load(path, shardings=where)[0]
    make = functools.partial(transformer.init, model)
    key = keys.draw_at(root_key, 0, keys.Room.INIT).key
    return jax.jit(make, out_shardings=where)(key)

  return House(
    config=config,
    mesh=mesh,
    root_key=root_key,
    method=configs.make_method(config),
    objective=configs.make_objective(config),
    optimizer=update.make_optimizer(
      total_steps=config.steps * config.objective.inner_updates,
      **dataclasses.asdict(config.optimizer),
    ),
    tokenizer=words,
    stop_ids=stop_ids,
    train=train,
    held_out=held_out,
    model=model,
    initial_params=initial_params,
    rows=batches.Rows(
      config.pack.row_length,
      config.pack.rows,
      config.pack.window,
      config.pack.shares_prompts,
    ),
  )


def _tokenizer(config: configs.Config, path: str) -> tokenizer.Tokenizer:
  if not path:
    return tokenizer.CharacterTokenizer()
  return tokenizer.PretrainedTokenizer(
    path,
    system=config.data.system,
    instruction=config.data.instruction,
    template_args=config.data.template_args,
  )


def _model(
  shape: configs.Model, path: str, vocab_size: int, attention: str
) -> transformer.ModelConfig:
  """The checkpoint's architecture or, without one, Qwen3 in this shape."""
  if path:
    model = checkpoint_hf.read_config(path, shape.dtype, shape.remat)
    return dataclasses.replace(model, attention=attention)
  return transformer.ModelConfig(
    vocab=buckets.round_up(vocab_size, 8),
    embed=shape.embed,
    layers=shape.layers,
    heads=shape.heads,
    kv_heads=shape.kv_heads,
    head_dim=shape.head_dim,
    mlp=shape.mlp,
    has_qk_norm=True,
    dtype=shape.dtype,
    remat=shape.remat,
    attention=attention,
  )


def _attention(config: configs.Config) -> str:
  """The attention that suits the machine, or the one asked for if it can be."""
  name, machine = config.model.attention, jax.default_backend()
  row_length, group_size = config.pack.row_length, config.rollout.group_size
  fits = row_length % kernels.LANES == 0 and (
    group_size <= kernels.MAX_BRANCHES or not config.pack.shares_prompts
  )
  if name == "auto":
    return "splash" if machine == "tpu" and fits else "xla"
  if name == "xla":
    return name
  needed = {"splash": "tpu", "triton": "gpu"}[name]
  if machine != needed:
    raise ValueError(
      f"config.model.attention is {name!r}, which is for a {needed}, but JAX "
      f"runs on a {machine}: set it to auto"
    )
  if not fits:
    raise ValueError(
      f"config.model.attention is {name!r}, which takes rows of a multiple of "
      f"{kernels.LANES} cells and at most {kernels.MAX_BRANCHES} completions "
      f"that share a prompt, but config.pack.row_length is {row_length} and "
      f"config.rollout.group_size {group_size}"
    )
  return name


def _problems(
  config: configs.Config, words: tokenizer.Tokenizer
) -> tuple[data.ProblemSet, data.ProblemSet | None]:
  d = config.data
  train, held_out = data.load(
    words,
    config.seed,
    train=d.train,
    eval=d.eval,
    train_limit=d.train_limit,
    eval_limit=d.eval_limit,
    columns=sources.Columns(
      d.problem_key, d.answer_key, d.id_key, d.solution_key
    ),
    max_prompt_tokens=d.max_prompt_tokens,
    num_arithmetic=d.num_arithmetic,
    max_operations=d.max_operations,
  )
  longest = train.tokens.shape[1] + config.rollout.max_tokens - 1
  if longest > config.pack.row_length:
    raise ValueError(
      f"a prompt of {train.tokens.shape[1]} tokens and a completion of "
      f"{config.rollout.max_tokens} take {longest} cells but a packed row "
      f"holds {config.pack.row_length}: raise config.pack.row_length, or "
      "lower config.rollout.max_tokens or config.data.max_prompt_tokens"
    )
  wanted = {"data.prompts_per_step": d.prompts_per_step}
  if config.warmup.steps:
    wanted["warmup.sequences_per_step"] = config.warmup.sequences_per_step
  for name, number in wanted.items():
    if len(train) < number:
      raise ValueError(
        f"config.{name} is {number} but {d.train} has {len(train)} usable "
        "problems"
      )
  if config.warmup.steps and not any(train.solutions):
    raise ValueError(
      f"config.warmup.steps is {config.warmup.steps} but no problem of "
      f"{d.train} has a solution to imitate: name the column with "
      "config.data.solution_key, or set config.warmup.steps to 0"
    )
  return train, held_out


def _check_ids(
  model: transformer.ModelConfig,
  stop_ids: tuple[int, ...],
  problems: list[data.ProblemSet],
) -> None:
  """Refuses token ids for which the model has no embedding."""
  for stop_id in stop_ids:
    if not isinstance(stop_id, int) or not 0 <= stop_id < model.vocab:
      raise ValueError(
        f"the stop id {stop_id!r} is no token of the model, which has "
        f"{model.vocab}: set config.rollout.stop_ids"
      )
  largest = max(int(x.tokens.max()) for x in problems)
  if largest >= model.vocab:
    raise ValueError(
      f"a prompt has token {largest} but the model's vocabulary is "
      f"{model.vocab}: config.model.path holds a tokenizer of another model"
    )


def _check_refill(config: configs.Config) -> None:
  """Refuses an exact refill where the groups it passes over would count."""
  refill = configs.make_method(config).refill
  if not (refill and refill.is_exact):
    return
  objective = configs.make_objective(config)
  counts = {
    "config.reward.overlong_tokens": config.reward.overlong_tokens,
    "config.objective.args.beta": objective.beta,
  }
  for name, value in counts.items():
    if value:
      raise ValueError(
        f"{name} is {value} but an exact refill passes over groups whose "
        "rewards are all the same, which would have counted: set it to 0, or "
        "config.method.args.refill to plain or none"
      )
  if config.objective.args.get("tokens_per_completion") == 0:
    raise ValueError(
      "config.objective.args.tokens_per_completion is 0 but the mean length of "
      "the groups that an exact refill gathers is not that of all: set it to "
      "what a completion usually takes"
    )


def _check_from_run(from_run: str) -> None:
  if from_run and not (pathlib.Path(from_run) / "checkpoints/0").is_dir():
    raise ValueError(
      f"config.warmup.from_run is {from_run} but there is no checkpoint of "
      "step 0 in it"
    )


def check_batches(mesh: jax.sharding.Mesh, config: configs.Config) -> None:
  """Refuses a mesh over which prompts, slots or rows cannot be divided."""
  flat, num_shards = configs.flatten(config), mesh.shape["data"]
  names = ["data.prompts_per_step", "rollout.num_slots", "pack.rows"]
  if config.data.eval:
    names.append("eval.prompts")
  for name in names:
    if flat[name] % num_shards:
      raise ValueError(
        f"config.{name} is {flat[name]} but must be a multiple of the "
        f"{num_shards} devices of config.mesh.data"
      )


def check_weights(
  mesh: jax.sharding.Mesh, model: transformer.ModelConfig
) -> None:
  """Refuses a mesh over which some weight cannot be divided."""
  for name, param in transformer.parameter_table(model).items():
    for size, axis in zip(param.shape, param.axes, strict=True):
      mesh_axis = sharding.RULES[axis]
      if mesh_axis and size % mesh.shape[mesh_axis]:
        raise ValueError(
          f"config.mesh.{mesh_axis} is {mesh.shape[mesh_axis]} but the {axis} "
          f"axis of {name}, {size}, is not a multiple of it"
        )
