"""Every knob, stated once: type, default, unit, range and reason.

Nothing below `train.py` sees a config: rooms take plain arguments. A config
file returns a `Config` and says how it differs from these defaults.
"""

# No `from __future__ import annotations` here: config_flags reads the types.
from collections.abc import Callable
import dataclasses
import inspect
import json
from typing import Any

from dppo_jax import methods
from dppo_jax.algo import objectives
from dppo_jax.models import attention, transformer


@dataclasses.dataclass(slots=True)
class Model:
  """A checkpoint to start from or, with neither path nor hub_id, a shape."""

  path: str = ""  # directory with config.json, *.safetensors, tokenizer files
  hub_id: str = ""  # fetched with huggingface_hub where path is empty
  layers: int = 2  # the shape of a Qwen3 model made on the spot
  embed: int = 64
  heads: int = 4
  kv_heads: int = 2
  head_dim: int = 16
  mlp: int = 192
  dtype: str = "float32"  # of the computation; master weights are float32
  # What the backward pass computes again: "layers" all of a layer, "dots" all
  # but its matrix products, "none" nothing. Each takes more memory.
  remat: str = "layers"
  # "xla" runs everywhere; "splash" on TPU, "triton" on NVIDIA; "auto" takes
  # splash where it can.
  attention: str = "auto"


@dataclasses.dataclass(slots=True)
class Data:
  """Problems. A source is `arithmetic`, `tfds:NAME[:SPLIT]` or a file.

  A file ends in .jsonl, .jsonl.gz or .parquet.
  """

  train: str = "arithmetic"
  eval: str = "arithmetic"  # empty evaluates nothing
  train_limit: int = 0  # first problems of the source; 0 takes all
  eval_limit: int = 256  # likewise
  problem_key: str = "problem,question"  # the first column that there is
  answer_key: str = "answer"  # text after the last "####", if any, counts
  id_key: str = "id"  # optional column, distinct; else rows are numbered
  solution_key: str = "solution"  # optional column; read by the warm-up
  prompts_per_step: int = 16  # N, counted before any is pruned
  max_prompt_tokens: int = 512  # longer prompts are left out and counted
  system: str = ""  # system message of the chat template
  instruction: str = ""  # follows the problem in the user's message
  template_args: dict = dataclasses.field(
    default_factory=dict
  )  # e.g. enable_thinking=False for Qwen3
  num_arithmetic: int = 4096  # problems made; one in eight is held out
  max_operations: int = 6  # in an arithmetic problem


@dataclasses.dataclass(slots=True)
class Rollout:
  group_size: int = 8  # G, completions of each prompt
  max_tokens: int = 64  # T, tokens of a completion, stop token included
  num_slots: int = 64  # completions that decode side by side
  prefill_prompts: int = 16  # prompts that prefill side by side
  # Of the sampler's computation; empty is model.dtype. Where it is not, the
  # sampler is a little off its policy, as update/policy_ratio_max shows.
  dtype: str = ""
  temperature: float = 1.0  # also divides the trainer's logits
  # The trainer's distribution is not truncated: with these two the sampler is
  # off its policy, as update/policy_ratio_max shows.
  top_k: int = 0  # 0 keeps every token
  top_p: float = 1.0  # 1 keeps every token
  stop_ids: tuple = ()  # empty asks the checkpoint, then the tokenizer


@dataclasses.dataclass(slots=True)
class Reward:
  kind: str = "exact"  # "exact" compares text; "math" asks math-verify
  format_reward: float = 0.0  # added where the answer is in \boxed{}
  # The last so many tokens before rollout.max_tokens cost up to 1 (DAPO's soft
  # overlong punishment); 0 costs nothing.
  overlong_tokens: int = 0
  num_workers: int = 2  # grader processes; "exact" needs none
  timeout_seconds: float = 5.0  # wall clock for one completion


def default_args(factory: Callable) -> dict[str, Any]:
  """The arguments of a factory with their defaults: each becomes a flag."""
  parameters = inspect.signature(factory).parameters
  return {name: p.default for name, p in parameters.items()}


@dataclasses.dataclass(slots=True)
class Method:
  name: str = "dppo"  # a key of methods.METHODS
  args: dict = dataclasses.field(  # of its factory
    default_factory=lambda: default_args(methods.dppo)
  )


@dataclasses.dataclass(slots=True)
class Objective:
  name: str = "grpo"  # a key of objectives.OBJECTIVES
  args: dict = dataclasses.field(  # of its factory
    default_factory=lambda: default_args(objectives.grpo)
  )
  args_of: str = "grpo"  # whose defaults they are; set with the name
  inner_updates: int = 1  # mu, optimizer steps on one rollout
  train_zero_advantage: bool = False  # True pays for terms that are zero


@dataclasses.dataclass(slots=True)
class Pack:
  row_length: int = 128  # L, at least prompt + completion - 1
  rows: int = 16  # rows of one micro-batch
  window: int = 64  # sequences among which the packer chooses
  shares_prompts: bool = True  # neighbours of one prompt share its cells
  head_tokens: int = 2048  # tokens whose logits exist at once


@dataclasses.dataclass(slots=True)
class Optimizer:
  """AdamW behind global-norm clipping."""

  learning_rate: float = 1e-6
  schedule: str = "constant"  # after the ramp: constant, linear or cosine
  ramp_steps: int = 0  # updates, inner ones too, from 0 to learning_rate
  weight_decay: float = 0.0
  b1: float = 0.9
  b2: float = 0.999
  clip_norm: float = 1.0


@dataclasses.dataclass(slots=True)
class Warmup:
  """Supervised steps before the first rollout; 0 steps skips them."""

  steps: int = 0
  from_run: str = ""  # workdir of a run: its first weights, instead of steps
  sequences_per_step: int = 64
  direct_share: float = 0.5  # arithmetic: share of answers without the work
  learning_rate: float = 3e-3


@dataclasses.dataclass(slots=True)
class Eval:
  every: int = 0  # steps; 0 evaluates at the start and at the end only
  samples: int = 0  # of each problem at rollout.temperature; 0 is greedy
  prompts: int = 64  # problems rolled out side by side


@dataclasses.dataclass(slots=True)
class Checkpoint:
  every: int = 0  # steps; 0 saves at the start and at the end only
  keep: int = 2  # newest checkpoints; that of step 0 stays as well


@dataclasses.dataclass(slots=True)
class Mesh:
  # Devices over which prompts, slots and rows are divided; -1 takes all.
  data: int = 1
  model: int = 1  # devices over which heads, feed-forward and vocabulary are


@dataclasses.dataclass(slots=True)
class Config:
  seed: int = 0
  steps: int = 100  # updates after the warm-up
  model: Model = dataclasses.field(default_factory=Model)
  data: Data = dataclasses.field(default_factory=Data)
  rollout: Rollout = dataclasses.field(default_factory=Rollout)
  reward: Reward = dataclasses.field(default_factory=Reward)
  method: Method = dataclasses.field(default_factory=Method)
  objective: Objective = dataclasses.field(default_factory=Objective)
  pack: Pack = dataclasses.field(default_factory=Pack)
  optimizer: Optimizer = dataclasses.field(default_factory=Optimizer)
  warmup: Warmup = dataclasses.field(default_factory=Warmup)
  eval: Eval = dataclasses.field(default_factory=Eval)
  checkpoint: Checkpoint = dataclasses.field(default_factory=Checkpoint)
  mesh: Mesh = dataclasses.field(default_factory=Mesh)


def use_method(config: Config, choice: str) -> None:
  """Names the method, and gives it the arguments that it has by default.

  Args:
    choice: a method, or a method and an objective: "dppo", "dppo,gspo".
  """
  name, _, objective = choice.partition(",")
  factory = methods.METHODS.get(name)
  # A name that is unknown is `validate`'s to refuse.
  config.method = Method(name, default_args(factory) if factory else {})
  if objective:
    factory = objectives.OBJECTIVES.get(objective)
    config.objective.name = config.objective.args_of = objective
    config.objective.args = default_args(factory) if factory else {}


def make_method(config: Config) -> methods.Method:
  """The method that the config names, with its arguments."""
  args = dict(config.method.args)
  if args.get("steps") == 0:  # a schedule over the run
    args["steps"] = config.steps
  return _make(methods.METHODS, "method", config.method.name, args)


def make_objective(config: Config) -> objectives.Objective:
  """The objective that the config names, with its arguments."""
  choice = config.objective
  if choice.name in objectives.OBJECTIVES and choice.name != choice.args_of:
    raise ValueError(
      f"config.objective.name is {choice.name!r} but config.objective.args "
      f"are those of {choice.args_of!r}: name it after the method instead, as "
      f"in --config=FILE.py:{config.method.name},{choice.name}, which brings "
      "its own"
    )
  return _make(objectives.OBJECTIVES, "objective", choice.name, choice.args)


def _make(
  factories: dict[str, Callable], what: str, name: str, args: dict
) -> Any:
  if name not in factories:
    raise ValueError(
      f"config.{what}.name is {name!r} but must be one of "
      f"{', '.join(factories)}"
    )
  try:
    return factories[name](**args)
  except TypeError as error:
    raise ValueError(
      f"config.{what}.args do not fit {name}: {error}; a method named after "
      "the config's file, as in FILE.py:grpo, brings its own"
    ) from error


def validate(config: Config) -> None:
  """Refuses values that cannot work, naming value, limit and knob.

  Raises:
    ValueError: for the first that is found.
  """
  make_method(config)
  make_objective(config)
  flat = flatten(config)
  for name, least in _LEAST.items():
    if not flat[name] >= least:
      raise ValueError(
        f"config.{name} is {flat[name]} but must be at least {least}"
      )
  for name, choices in _CHOICES.items():
    if flat[name] not in choices:
      raise ValueError(
        f"config.{name} is {flat[name]!r} but must be one of "
        f"{', '.join(choices)}"
      )
  r = config.rollout
  if not 0 < r.top_p <= 1:
    raise ValueError(f"config.rollout.top_p is {r.top_p}, outside (0, 1]")
  if not r.temperature > 0:
    raise ValueError(
      f"config.rollout.temperature is {r.temperature} but must be above 0: "
      "greedy completions of one prompt are all alike"
    )
  if config.reward.overlong_tokens > r.max_tokens:
    raise ValueError(
      f"config.reward.overlong_tokens is {config.reward.overlong_tokens} but "
      f"must be at most config.rollout.max_tokens, {r.max_tokens}"
    )
  if not config.optimizer.clip_norm > 0:
    raise ValueError(
      f"config.optimizer.clip_norm is {config.optimizer.clip_norm} but must be "
      "above 0; a large one, such as 1e9, clips nothing"
    )
  if not 0 <= config.warmup.direct_share <= 1:
    raise ValueError(
      f"config.warmup.direct_share is {config.warmup.direct_share}, "
      "outside [0, 1]"
    )
  if config.pack.row_length % 8:
    raise ValueError(
      f"config.pack.row_length is {config.pack.row_length} but must be a "
      "multiple of 8"
    )
  if config.mesh.data != -1 and config.mesh.data < 1:
    raise ValueError(
      f"config.mesh.data is {config.mesh.data} but must be at least 1, or -1 "
      "for every device"
    )
  m = config.model
  if m.heads % m.kv_heads:
    raise ValueError(
      f"config.model.heads is {m.heads} but must be a multiple of "
      f"config.model.kv_heads, {m.kv_heads}"
    )
  if m.head_dim % 2:
    raise ValueError(f"config.model.head_dim is {m.head_dim} but must be even")


_LEAST = {
  "steps": 0,
  "model.layers": 1,
  "model.embed": 1,
  "model.heads": 1,
  "model.kv_heads": 1,
  "model.head_dim": 2,
  "model.mlp": 1,
  "data.prompts_per_step": 1,
  "data.max_prompt_tokens": 1,
  "data.train_limit": 0,
  "data.eval_limit": 0,
  "rollout.group_size": 2,
  "rollout.max_tokens": 1,
  "rollout.num_slots": 1,
  "rollout.prefill_prompts": 1,
  "rollout.top_k": 0,
  "reward.overlong_tokens": 0,
  "reward.num_workers": 1,
  "objective.inner_updates": 1,
  "pack.row_length": 8,
  "pack.rows": 1,
  "pack.window": 1,
  "pack.head_tokens": 1,
  "optimizer.learning_rate": 0.0,
  "optimizer.ramp_steps": 0,
  "optimizer.weight_decay": 0.0,
  "warmup.learning_rate": 0.0,
  "warmup.steps": 0,
  "warmup.sequences_per_step": 1,
  "eval.every": 0,
  "eval.samples": 0,
  "eval.prompts": 1,
  "checkpoint.every": 0,
  "checkpoint.keep": 1,
  "mesh.model": 1,
}

_CHOICES = {
  "model.dtype": ("float32", "bfloat16"),
  "model.remat": tuple(transformer.REMAT),
  "model.attention": ("auto", *attention.BACKENDS),
  "rollout.dtype": ("", "float32", "bfloat16"),
  "reward.kind": ("exact", "math"),
  "optimizer.schedule": ("constant", "linear", "cosine"),
}


def flatten(config: Config) -> dict[str, Any]:
  """Every value by its dotted name; `method.args` and its like stay whole."""
  flat = {}
  for section, value in dataclasses.asdict(config).items():
    if isinstance(value, dict):
      flat |= {f"{section}.{name}": v for name, v in value.items()}
    else:
      flat[section] = value
  return json.loads(json.dumps(flat))
