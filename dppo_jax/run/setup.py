"""A run before its first step: the validated state that its stages share."""

from collections.abc import Callable, Sequence
import dataclasses
import functools
from typing import NamedTuple

import jax
from jaxtyping import PyTree

from dppo_jax import config as configs
from dppo_jax import data, distributed, rewards, sharding
from dppo_jax.algo.packing import PackingSpec
from dppo_jax.data import sources
from dppo_jax.errors import UserError
from dppo_jax.files import bucket
from dppo_jax.models import attention, gpu_library, hf, lora, parameters
from dppo_jax.models.config import ModelConfig, drop_idle_window
from dppo_jax.models.hf import peft
from dppo_jax.rng import Stage, rng_at
from dppo_jax.rollout import Sampling
from dppo_jax.run import kernel_check, preflight
from dppo_jax.step import programs
from dppo_jax.step.optimizer import Optimizer, make_optimizer
from dppo_jax.step.spec import StepSpec


class Run(NamedTuple):
  """Everything that a run reads before its first step.

  Attributes:
    spec: specification of a step, all that the config says about it.
    tokenizer: None in a plan.
    train_set: problems to train on; None without training.
    eval_sets: problems to evaluate on, by the name of their set.
    eval_samples: completions of each of them; 0 for a greedy one only.
    is_tuned: True if all weights are fine-tuned before the first rollout.
    reward_specs: reward functions, the verifier first.
    make_grader: returns the grader, not yet started.
    origin: checkpoint and adapter that the weights come from, for messages.
    path: directory of the checkpoint; empty for a randomly initialised model.
    adapter: directory or URL of the adapter to start from; empty for none.
    shapes: what the choice of an attention backend depended on.
    kernel_fault: why attention is in plain XLA although there is a kernel.
  """

  spec: StepSpec
  tokenizer: data.Tokenizer | None
  train_set: data.ProblemSet | None
  eval_sets: dict[str, data.ProblemSet]
  eval_samples: int
  is_tuned: bool
  reward_specs: tuple[rewards.RewardSpec, ...]
  make_grader: Callable[[], rewards.Grader]
  origin: str
  path: str
  adapter: str
  shapes: attention.Shapes
  kernel_fault: str = ""

  def initial_params(self) -> parameters.Params:
    """Returns the initial weights, placed on the mesh."""
    if self.adapter:
      peft.check(_local_adapter(self.adapter), self.spec.model)
    model = self.spec.without_adapters().model
    shardings = parameters.shardings(model, self.spec.mesh)
    if self.path:
      dtype = self.spec.model.param_dtype
      params = hf.load(self.path, shardings=shardings, param_dtype=dtype)[0]
    else:
      init = functools.partial(parameters.init, model)
      params = self._jitted(init, shardings)(self._init_key)
    return self.add_adapters(params)

  def add_adapters(self, params: parameters.Params) -> parameters.Params:
    """Returns weights with the adapters that training starts from, if any."""
    if not self.spec.model.lora:
      return params
    shardings = parameters.shardings(self.spec.model, self.spec.mesh)
    places = {lora.KEY: shardings[lora.KEY]}
    cast = functools.partial(parameters.cast, config=self.spec.model)
    params = jax.jit(cast, donate_argnums=0)(params)
    if self.adapter:
      path = _local_adapter(self.adapter)
      return params | peft.load(path, self.spec.model, places)
    init = functools.partial(parameters.init_adapters, self.spec.model)
    return params | self._jitted(init, places)(self._init_key)

  def without_adapters(self) -> "Run":
    """Returns the run that trains all weights of its model."""
    return self._replace(spec=self.spec.without_adapters(), adapter="")

  def _jitted(self, init: Callable, shardings: PyTree) -> Callable:
    options = programs.compiler_options(self.spec.platform)
    return jax.jit(init, out_shardings=shardings, compiler_options=options)

  @property
  def _init_key(self) -> jax.Array:
    return rng_at(self.spec.root_key, 0, Stage.INIT).key


def _local_adapter(where: str) -> str:
  return bucket.local(where, "config.lora.adapter")


def setup_run(
  config: configs.Config,
  trains: bool = True,
  evaluates: bool = True,
  begins: bool = True,
) -> Run:
  """Checks the config and reads all that a run needs, in every process.

  Args:
    trains: True to read and check the problems to train on.
    evaluates: True to read and check those to evaluate on.
    begins: False if a checkpoint has the weights, wherever they came from.
  """
  with distributed.sharing_errors():
    run = _read_run(config, trains, evaluates, trains and begins)
  spec, fault = kernel_check.checked(run.spec, config.model.attention)
  return run._replace(spec=spec, kernel_fault=fault)


def _read_run(
  config: configs.Config, trains: bool, evaluates: bool, begins: bool
) -> Run:
  eval_source = config.data.eval if evaluates else ""
  configs.validate(config, trains)
  mesh = sharding.make_mesh(**dataclasses.asdict(config.mesh))
  preflight.check_processes(mesh)
  rewards.check(config.reward.functions)
  if trains:
    preflight.check_training(mesh, config)
  data.check(config.data.train if trains else "", eval_source)
  path, tokenizer, model = read_model(config)
  if begins and config.lora.adapter:
    peft.check(
      _local_adapter(config.lora.adapter), with_lora(model, config.lora)
    )
  train_set, eval_sets = read_problems(config, tokenizer, eval_source, trains)
  device = mesh.devices.flat[0]
  run = make_run(
    config,
    mesh,
    device.platform,
    path,
    tokenizer,
    model,
    train_set,
    eval_sets,
    float(getattr(device, "compute_capability", gpu_library.HOPPER)),
  )
  if begins and config.sft.from_run:
    preflight.check_start(config.sft.from_run, run.spec)
  return run


def make_run(
  config: configs.Config,
  mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh,
  platform: str,
  path: str,
  tokenizer: data.Tokenizer | None,
  model: ModelConfig,
  train_set: data.ProblemSet | None,
  eval_sets: dict[str, data.ProblemSet],
  capability: float = gpu_library.HOPPER,
) -> Run:
  """Returns the run of a config, model and problems that fit each other.

  Args:
    capability: compute capability of GPUs; for the other arguments see `Run`.
  """
  c, method = config, configs.make_method(config)
  problems = [x for x in (train_set, *eval_sets.values()) if x]
  model, shapes = _fit(model, c, problems, platform, capability)
  stop_ids = _stop_ids(c, tokenizer)
  preflight.check_weights(mesh, model)
  sampling = Sampling(
    c.rollout.max_tokens,
    stop_ids,
    c.rollout.temperature,
    c.rollout.top_k,
    c.rollout.top_p,
  )
  preflight.check_ids(sampling, model.vocab, problems)
  spec = StepSpec(
    mesh=mesh,
    platform=platform,
    root_key=jax.random.key(c.seed),
    model=model,
    method=method,
    objective=configs.make_objective(c),
    packing=PackingSpec(
      c.pack.row_length,
      c.pack.rows_per_micro * sharding.num_shards(mesh, "batch"),
      # Tokens are drawn along the rows, in an order that no mesh changes.
      spread_rows=method.tokens is None,
    ),
    sampling=sampling,
    optimizer=_optimizer(c) if train_set else None,
    num_problems=len(train_set) if train_set else 0,
    prompt_tokens=train_set.tokens.shape[1] if train_set else 0,
    num_prompts=c.data.prompts_per_step,
    group_size=c.rollout.group_size,
    num_slots=c.rollout.num_slots,
    stop_strings=tuple(c.rollout.stop_strings),
    overlong_tokens=c.reward.overlong_tokens,
    mask_truncated=c.objective.mask_truncated,
    inner_updates=c.objective.inner_updates,
    mini_batches=c.objective.mini_batches,
  )
  if train_set:
    preflight.check_optimizer(spec)
    if method.budget:
      method.budget.policy()  # reads its file
  origin = c.model.path or c.model.hub_id or "random, without a checkpoint"
  origin += f", with the adapter {c.lora.adapter}" * bool(c.lora.adapter)
  return Run(
    spec,
    tokenizer,
    train_set,
    eval_sets,
    c.eval.samples,
    c.sft.needs_solutions,
    rewards.parse(c.reward.functions),
    functools.partial(
      rewards.Grader,
      c.reward.functions,
      timeout_seconds=c.reward.timeout_seconds,
    ),
    origin,
    path,
    c.lora.adapter,
    shapes,
  )


def _fit(
  model: ModelConfig,
  config: configs.Config,
  problems: Sequence[data.ProblemSet],
  platform: str,
  capability: float,
) -> tuple[ModelConfig, attention.Shapes]:
  """Returns the model with adapters, and attention that suits its sequences.

  The second result is what the choice of the backend depended on.
  """
  c = config
  widths = [x.tokens.shape[1] for x in problems]
  longest = max(widths, default=c.data.max_prompt_tokens)
  longest += c.rollout.max_tokens
  if c.sft.steps:
    longest = max(longest, c.pack.row_length)
  model = drop_idle_window(with_lora(model, c.lora), longest)
  shapes = attention.Shapes(
    platform,
    c.pack.row_length,
    c.rollout.group_size,
    model.head_dim,
    has_window=bool(model.local and model.local.window),
    dtype=model.dtype,
    capability=capability,
  )
  backend = attention.choose_backend(c.model.attention, shapes)
  return dataclasses.replace(model, attention=backend), shapes


def _stop_ids(
  config: configs.Config, tokenizer: data.Tokenizer | None
) -> tuple[int, ...]:
  """Returns the ids that end decoding, stop strings of one token included."""
  default = tokenizer.stop_ids if tokenizer else (0,)
  stop_ids = tuple(config.rollout.stop_ids) or default
  if tokenizer:
    for text in config.rollout.stop_strings:
      ids = tokenizer.encode(text)  # perhaps of an unknown token
      if len(ids) == 1 and text in tokenizer.decode(ids, False):
        stop_ids += (ids[0],)
  return stop_ids


def _optimizer(config: configs.Config) -> Optimizer:
  """Returns the optimizer that the config describes."""
  objective = config.objective
  num_updates = objective.inner_updates * objective.mini_batches
  options = dataclasses.asdict(config.optimizer)
  del options["function"]
  return make_optimizer(
    total_steps=config.steps * num_updates,
    factory=configs.load_optimizer(config),
    **options,
  )


def with_lora(model: ModelConfig, options: configs.LoraConfig) -> ModelConfig:
  """Returns the architecture with the adapters that the options describe."""
  table = parameters.parameter_table(model)
  adapters = lora.choose(table, options.rank, options.alpha, options.targets)
  return dataclasses.replace(model, lora=adapters)


def read_model(
  config: configs.Config,
) -> tuple[str, data.Tokenizer, ModelConfig]:
  """Returns path, tokenizer and architecture; fetches what is not on disk."""
  path = bucket.local(config.model.path, "config.model.path")
  if config.model.hub_id and not path:
    path = hf.fetch(config.model.hub_id)
  tokenizer: data.Tokenizer = data.CharacterTokenizer()
  if path:
    hf.check(path)
    tokenizer = data.PretrainedTokenizer(path, config.data.template_args)
  model = describe_model(config.model, path, tokenizer.vocab_size)
  return path, tokenizer, model


def describe_model(
  options: configs.ModelConfig, path: str, vocab_size: int
) -> ModelConfig:
  """The checkpoint's architecture or, without one, Qwen3 of `options.shape`."""
  if path:
    return hf.read_config(path, options.dtype, options.remat)
  return ModelConfig(
    vocab=sharding.round_up(vocab_size, 8),
    has_qk_norm=True,
    dtype=options.dtype,
    remat=options.remat,
    **options.shape,
  )


def read_problems(
  config: configs.Config,
  tokenizer: data.Tokenizer,
  eval_source: sources.Source,
  trains: bool = True,
  needs_answers: bool = True,
) -> tuple[data.ProblemSet | None, dict[str, data.ProblemSet]]:
  """Returns the problems to train on and, by name, those to evaluate on."""
  c, options = config, dataclasses.asdict(config.data) | {"eval": eval_source}
  prompts = options.pop("prompts_per_step")
  del options["template_args"]
  options |= {"trains": trains, "needs_answers": needs_answers}
  train_set, eval_sets = data.load(tokenizer, c.seed, **options)
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
