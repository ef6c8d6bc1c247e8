"""A run before its first step: everything its stages share, checked."""

from collections.abc import Callable
import dataclasses
import functools
import textwrap
from typing import NamedTuple

import jax

from dppo_jax import config as configs
from dppo_jax import data, rewards, sharding
from dppo_jax.algo import packing, policy_loss
from dppo_jax.errors import UserError
from dppo_jax.methods import Method
from dppo_jax.models import attention, hf, transformer
from dppo_jax.rng import Stage, rng_at
from dppo_jax.run import memory, preflight

ProblemSets = tuple[data.ProblemSet | None, dict[str, data.ProblemSet]]


class Run(NamedTuple):
  """State shared by the stages of a step.

  Attributes:
    mesh: devices, not necessarily of this machine.
    platform: cpu, gpu or tpu.
    train_set: problems to train on; None without training.
    eval_sets: problems to evaluate on, by the name of their set.
    initial_params: returns the initial weights, placed on the mesh.
  """

  config: configs.Config
  mesh: jax.sharding.Mesh
  platform: str
  root_key: jax.Array
  method: Method
  objective: policy_loss.Objective
  tokenizer: data.Tokenizer
  stop_ids: tuple[int, ...]
  train_set: data.ProblemSet | None
  eval_sets: dict[str, data.ProblemSet]
  model: transformer.ModelConfig
  initial_params: Callable[[], transformer.Params]
  packing: packing.PackingSpec

  @property
  def num_updates(self) -> int:
    """Optimizer updates in the full run."""
    return self.config.steps * self.config.objective.num_updates

  def make_grader(self) -> rewards.Grader:
    """Returns the grader of the config, not yet started."""
    r = self.config.reward
    return rewards.Grader(
      r.functions, r.num_workers, r.timeout_seconds, r.on_error
    )

  def description(self) -> str:
    """Model, problems and batch sizes of the run, as text."""
    c, m, p = self.config, self.model, self.packing
    prompts, group_size = c.data.prompts_per_step, c.rollout.group_size
    longest = self.train_set.tokens.shape[1] + c.rollout.max_tokens - 1
    parts = c.objective.mini_batches
    num_rows = p.num_rows(prompts // parts * group_size, longest)
    epoch, left_over = divmod(len(self.train_set), prompts)
    reports = [x.report for x in self.eval_sets.values()]
    text = "\n".join(
      [
        f"model: {m.family}, {m.layers} layers of width {m.embed}, "
        f"{transformer.num_parameters(m):,} parameters, {m.dtype}; mesh "
        f"{sharding.describe(self.mesh)}",
        self.train_set.report,
        *(reports or ["eval: no problems"]),
        self.train_set.first_prompt,
        f"step: {prompts} prompts x {group_size} sequences of at most "
        f"{longest} tokens, decoded in {c.rollout.num_slots} slots a device",
        f"update: micro-batches of {p.rows_per_micro} rows x {p.row_length} "
        f"tokens, at most {num_rows // p.rows_per_micro} in each of {parts} "
        f"mini-batches, {c.objective.num_updates} update(s) per rollout",
        f"epoch: {epoch} steps; {left_over} prompts are left over (different "
        "ones each epoch)",
        f"method: {_call(c.method)}, objective {_call(c.objective)}, "
        f"{c.steps} steps",
      ]
    )
    fill = functools.partial(
      textwrap.fill, width=79, subsequent_indent="  ", break_on_hyphens=False
    )
    return "\n".join(map(fill, text.splitlines()))


def _call(choice: configs.MethodConfig | configs.ObjectiveConfig) -> str:
  """Its name, with the arguments that are not at their defaults."""
  defaults = configs.default_args(choice.factory)
  args = ", ".join(
    f"{name}={value}"
    for name, value in choice.args.items()
    if value != defaults.get(name)
  )
  return f"{choice.name}({args})" if args else choice.name


class Inputs(NamedTuple):
  """Model and problems of a run.

  Attributes:
    path: directory of the checkpoint; empty for a randomly initialised model.
    problems: reads the problems to train on and those to evaluate on.
  """

  path: str
  tokenizer: data.Tokenizer | None
  model: transformer.ModelConfig
  stop_ids: tuple[int, ...]
  problems: Callable[[], ProblemSets]


def setup_run(
  config: configs.Config,
  mesh: jax.sharding.Mesh | None = None,
  platform: str | None = None,
  trains: bool = True,
  inputs: Inputs | None = None,
) -> Run:
  """Checks the config and gathers everything that a run needs.

  Args:
    mesh: devices, for a plan; None means the config's mesh on this machine.
    platform: cpu, gpu or tpu; None means that of the mesh's devices.
    trains: True to read and check the problems to train on.
    inputs: shapes in place of the files that the config names, for a plan.
  """
  configs.validate(config)
  preflight.check_dynamic_sampling(config)
  is_here = mesh is None
  if is_here:
    mesh = sharding.make_mesh(**dataclasses.asdict(config.mesh))
    preflight.check_processes(mesh)
    rewards.check(config.reward.functions)
  platform = platform or mesh.devices.flat[0].platform
  if trains:
    preflight.check_prompts(mesh, config)
    if config.sft.from_run and not inputs:
      preflight.check_from_run(config.sft.from_run)
  inputs = inputs or read_inputs(config, trains)
  backend = attention.choose_backend(
    config.model.attention,
    platform,
    config.pack.row_length,
    config.rollout.group_size,
  )
  model = dataclasses.replace(inputs.model, attention=backend)
  preflight.check_weights(mesh, model)
  if is_here and trains:
    memory.check(mesh, model, config)
  train_set, eval_sets = inputs.problems()
  stop_ids = tuple(config.rollout.stop_ids) or inputs.stop_ids
  preflight.check_ids(config, model, stop_ids, [train_set, *eval_sets.values()])
  if train_set:
    preflight.check_lengths(config, train_set.tokens.shape[1])
  if train_set and inputs.tokenizer and config.sft.needs_solutions:
    # For its errors, which would otherwise come after the compilation.
    data.problems.tokenize_solutions(
      train_set, inputs.tokenizer, stop_ids[0], config.pack.row_length
    )
  root_key = jax.random.key(config.seed)
  method = configs.make_method(config)
  return Run(
    config=config,
    mesh=mesh,
    platform=platform,
    root_key=root_key,
    method=method,
    objective=configs.make_objective(config),
    tokenizer=inputs.tokenizer,
    stop_ids=stop_ids,
    train_set=train_set,
    eval_sets=eval_sets,
    model=model,
    initial_params=functools.partial(
      _initial_params, inputs.path, model, mesh, root_key
    ),
    packing=packing.PackingSpec(
      config.pack.row_length,
      config.pack.rows_per_micro * sharding.num_shards(mesh, "batch"),
      # Tokens are drawn along the rows, in an order that no mesh changes.
      spread_rows=method.tokens is None,
    ),
  )


def _initial_params(
  path: str,
  model: transformer.ModelConfig,
  mesh: jax.sharding.Mesh,
  root_key: jax.Array,
) -> transformer.Params:
  shardings = transformer.shardings(model, mesh)
  if path:
    return hf.load(path, shardings=shardings)[0]
  init = functools.partial(transformer.init, model)
  key = rng_at(root_key, 0, Stage.INIT).key
  return jax.jit(init, out_shardings=shardings)(key)


def read_inputs(config: configs.Config, trains: bool = True) -> Inputs:
  """Reads model and tokenizer; fetches the model if it is not on disk."""
  path, args = config.model.path, config.data.template_args
  if config.model.hub_id and not path:
    path = hf.fetch(config.model.hub_id)
  if path:
    hf.check(path)
    tokenizer = data.PretrainedTokenizer(path, args)
  elif args:
    raise UserError(
      f"config.data.template_args is {args} but the arithmetic tokenizer, used "
      "without config.model.path, has no template"
    )
  else:
    tokenizer = data.CharacterTokenizer()
  return Inputs(
    path,
    tokenizer,
    describe_model(config.model, path, tokenizer.vocab_size),
    tokenizer.stop_ids,
    functools.partial(_read_problems, config, tokenizer, trains),
  )


def describe_model(
  options: configs.ModelConfig, path: str, vocab_size: int
) -> transformer.ModelConfig:
  """The checkpoint's architecture or, without one, Qwen3 of `options.shape`."""
  if path:
    return hf.read_config(path, options.dtype, options.remat)
  return transformer.ModelConfig(
    vocab=sharding.round_up(vocab_size, 8),
    has_qk_norm=True,
    dtype=options.dtype,
    remat=options.remat,
    **options.shape,
  )


def _read_problems(
  config: configs.Config, tokenizer: data.Tokenizer, trains: bool
) -> ProblemSets:
  c, options = config, dataclasses.asdict(config.data)
  prompts = options.pop("prompts_per_step")
  del options["template_args"]
  if trains and not c.data.train:
    raise UserError("config.data.train is empty: set a source to train on")
  train_set, eval_sets = data.load(tokenizer, c.seed, trains=trains, **options)
  if trains and len(train_set) < prompts:
    raise UserError(
      f"config.data.prompts_per_step is {prompts} but {c.data.train} has "
      f"{len(train_set)} usable problems"
    )
  if trains and c.sft.needs_solutions and not any(train_set.solutions):
    raise UserError(
      f"config.sft.steps is {c.sft.steps} but no problem of {c.data.train} has "
      "a solution to imitate: add a column 'solution', or set "
      "config.sft.steps to 0"
    )
  return train_set, eval_sets
