"""A run before its first step: everything it shares, checked and gathered."""

from collections.abc import Callable
import dataclasses
import functools
import textwrap
from typing import NamedTuple

import jax

from dppo_jax import config as configs
from dppo_jax import data, rewards, sharding
from dppo_jax.algo import packing, policy_loss
from dppo_jax.config.options import default_args
from dppo_jax.errors import UserError
from dppo_jax.methods import Method
from dppo_jax.models import attention, hf, transformer
from dppo_jax.rng import Stage, rng_at
from dppo_jax.run import memory, preflight

_NO_EVAL = "eval: no problems"


class Run(NamedTuple):
  """What the stages of a step share.

  Attributes:
    mesh: the devices, which need not be those of this machine.
    platform: of the devices: cpu, gpu or tpu.
    root_key: where all randomness starts.
    train_set: problems to train on; None where there is no training.
    eval_sets: problems to evaluate on by the name of their set, if any.
    initial_params: makes the weights to start from, placed on the mesh.
    packing: the shape of packed rows.
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
    """Optimizer steps in the full run."""
    return self.config.steps * self.config.objective.num_updates

  def make_grader(self) -> rewards.Grader:
    """The grader that the config asks for, not yet started."""
    r = self.config.reward
    return rewards.Grader(
      r.functions, r.num_workers, r.timeout_seconds, r.on_error
    )

  def description(self) -> str:
    """The batch arithmetic of a step, and what was read."""
    c, packing = self.config, self.packing
    prompts, group_size = c.data.prompts_per_step, c.rollout.group_size
    prompt_length = self.train_set.tokens.shape[1]
    longest = prompt_length + c.rollout.max_tokens - 1
    parts = c.objective.mini_batches
    num_rows = packing.num_rows(prompts // parts * group_size, longest)
    each = f" in each of {parts} mini-batches" if parts > 1 else ""
    epoch = len(self.train_set) // prompts
    fill = functools.partial(
      textwrap.fill, width=79, subsequent_indent="  ", break_on_hyphens=False
    )
    return "\n".join(
      fill(line)
      for about in [
        f"model: {self.model.family}, {self.model.layers} layers of width "
        f"{self.model.embed}, {transformer.num_parameters(self.model):,} "
        f"parameters, {self.model.dtype}; "
        f"mesh {sharding.describe(self.mesh)}",
        self.train_set.report,
        *([x.report for x in self.eval_sets.values()] or [_NO_EVAL]),
        self.train_set.first_prompt,
        f"step: {prompts} prompts x {group_size} completions = "
        f"{prompts * group_size} sequences of at most {longest} tokens "
        f"(prompt {prompt_length}, completion {c.rollout.max_tokens}), decoded "
        f"in {c.rollout.num_slots} slots a device",
        f"update: micro-batches of {packing.rows_per_micro} rows x "
        f"{packing.row_length} = "
        f"{packing.rows_per_micro * packing.row_length:,} tokens, at most "
        f"{num_rows // packing.rows_per_micro} of them{each}, "
        f"{c.objective.num_updates} update(s) on each rollout",
        f"epoch: {epoch} steps; {len(self.train_set) - epoch * prompts} "
        "prompts sit out, others each time",
        f"method: {_call(c.method)}, objective {_call(c.objective)}, "
        f"{c.steps} steps",
      ]
      for line in about.splitlines()
    )


def _call(choice: configs.MethodConfig | configs.ObjectiveConfig) -> str:
  """Its name, with the arguments that are not at their defaults."""
  defaults = default_args(choice.factory)
  args = [
    f"{name}={value}"
    for name, value in choice.args.items()
    if value != defaults.get(name)
  ]
  return f"{choice.name}({', '.join(args)})" if args else choice.name


def setup_run(
  config: configs.Config,
  mesh: jax.sharding.Mesh | None = None,
  platform: str | None = None,
  trains: bool = True,
) -> Run:
  """Checks the config and gathers what a run needs.

  Args:
    mesh: where it is to run; None makes the config's of this machine's
      devices. One of other devices serves to plan a run.
    platform: cpu, gpu or tpu; None is that of the mesh's devices.
    trains: False where there is to be no training: then problems to train on
      are neither read nor needed.
  Raises:
    UserError: for whatever cannot work, naming value, limit and option.
  """
  configs.validate(config)
  preflight.check_dynamic_sampling(config)
  is_here = mesh is None  # where to run, not where to plan to
  if is_here:
    mesh = sharding.make_mesh(**dataclasses.asdict(config.mesh))
    preflight.check_processes(mesh)
    rewards.check(config.reward.functions)
  platform = platform or mesh.devices.flat[0].platform
  if trains:
    preflight.check_prompts(mesh, config)
    if config.sft.from_run:
      preflight.check_from_run(config.sft.from_run)
  root_key = jax.random.key(config.seed)
  path = model_path(config.model)
  if path:
    hf.check(path)
  tokenizer = make_tokenizer(config, path)
  backend = attention.choose_backend(
    config.model.attention,
    platform,
    config.pack.row_length,
    config.rollout.group_size,
    share_prefix=True,
  )
  model = describe_model(config.model, path, tokenizer.vocab_size, backend)
  preflight.check_weights(mesh, model)
  if is_here:
    memory.check(mesh, model, config, trains)
  train_set, eval_sets = _problems(config, tokenizer, trains)
  stop_ids = tuple(config.rollout.stop_ids) or tokenizer.stop_ids
  if config.rollout.top_k > model.vocab:
    raise UserError(
      f"config.rollout.top_k is {config.rollout.top_k} but the vocabulary has "
      f"{model.vocab} tokens"
    )
  problem_sets = [train_set, *eval_sets.values()]
  preflight.check_ids(model, stop_ids, [x for x in problem_sets if x])
  if train_set and config.sft.needs_solutions:
    # For what it refuses: here it costs seconds, and later a start.
    data.problems.tokenize_solutions(
      train_set, tokenizer, stop_ids[0], config.pack.row_length
    )
  shardings = transformer.shardings(model, mesh)

  def initial_params() -> transformer.Params:
    if path:
      return hf.load(path, shardings=shardings)[0]
    init = functools.partial(transformer.init, model)
    key = rng_at(root_key, 0, Stage.INIT).key
    return jax.jit(init, out_shardings=shardings)(key)

  return assemble(
    config,
    mesh,
    model,
    platform=platform,
    tokenizer=tokenizer,
    stop_ids=stop_ids,
    train_set=train_set,
    eval_sets=eval_sets,
    initial_params=initial_params,
  )


def assemble(
  config: configs.Config,
  mesh: jax.sharding.Mesh,
  model: transformer.ModelConfig,
  **found,
) -> Run:
  """A run of what has been read and checked.

  Args:
    found: platform, tokenizer, stop_ids, train_set, eval_sets and
      initial_params.
  """
  method = configs.make_method(config)
  return Run(
    config=config,
    mesh=mesh,
    root_key=jax.random.key(config.seed),
    method=method,
    objective=configs.make_objective(config),
    model=model,
    packing=packing.PackingSpec(
      config.pack.row_length,
      config.pack.rows_per_micro * sharding.num_shards(mesh, "batch"),
      # Tokens are drawn along the rows, in an order that no mesh changes.
      spread_rows=method.tokens is None,
    ),
    **found,
  )


def model_path(options: configs.ModelConfig) -> str:
  """Directory of the checkpoint to start from, fetched if it has to be.

  Empty where the model is made on the spot.
  """
  if options.hub_id and not options.path:
    return hf.fetch(options.hub_id)
  return options.path


def make_tokenizer(config: configs.Config, path: str) -> data.Tokenizer:
  """The tokenizer of the checkpoint in `path`; of arithmetic where empty."""
  if not path:
    if config.data.template_args:
      raise UserError(
        f"config.data.template_args is {config.data.template_args} but the "
        "arithmetic tokenizer, used without config.model.path, has no chat "
        "template"
      )
    return data.CharacterTokenizer()
  return data.PretrainedTokenizer(path, config.data.template_args)


def describe_model(
  options: configs.ModelConfig,
  path: str,
  vocab_size: int,
  backend: str = "auto",
) -> transformer.ModelConfig:
  """The checkpoint's architecture or, without one, Qwen3 of `options.shape`."""
  if path:
    model = hf.read_config(path, options.dtype, options.remat)
    return dataclasses.replace(model, attention=backend)
  return transformer.ModelConfig(
    vocab=sharding.round_up(vocab_size, 8),
    has_qk_norm=True,
    dtype=options.dtype,
    remat=options.remat,
    attention=backend,
    **options.shape,
  )


def _problems(
  config: configs.Config, tokenizer: data.Tokenizer, trains: bool
) -> tuple[data.ProblemSet | None, dict[str, data.ProblemSet]]:
  d = config.data
  if trains and not d.train:
    raise UserError("config.data.train is empty: set a source to train on")
  train_set, eval_sets = data.load(
    tokenizer,
    config.seed,
    train=d.train,
    eval=d.eval,
    train_limit=d.train_limit,
    eval_limit=d.eval_limit,
    problem_key=d.problem_key,
    answer_key=d.answer_key,
    max_prompt_tokens=d.max_prompt_tokens,
    template=d.template,
    trains=trains,
  )
  if train_set:
    preflight.check_train_set(config, train_set)
  return train_set, eval_sets
