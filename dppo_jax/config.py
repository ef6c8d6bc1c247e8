"""Every knob, stated once: type, default, unit, range and reason.

Nothing below `train.py` sees a config: rooms take plain arguments. A config
file returns a `Config` and says how it differs from these defaults.
"""

# No `from __future__ import annotations` here: config_flags reads the types.
import dataclasses
from typing import Any


def _field(**args: Any) -> Any:
  return dataclasses.field(default_factory=lambda: dict(args))


@dataclasses.dataclass
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
  remat: bool = True  # recompute each layer in the backward pass


@dataclasses.dataclass
class Data:
  """Problems. A source is `arithmetic`, `tfds:NAME[:SPLIT]` or a file.

  A file ends in .jsonl, .jsonl.gz or .parquet.
  """

  train: str = "arithmetic"
  eval: str = "arithmetic"
  train_limit: int = 0  # first problems of the source; 0 takes all
  eval_limit: int = 256
  problem_key: str = "problem"  # column names
  answer_key: str = "answer"  # text after the last "####", if any, counts
  id_key: str = "source"  # optional column; row numbers where it is absent
  solution_key: str = "solution"  # optional column; read by the warm-up
  prompts_per_step: int = 16  # N, counted before any is pruned
  max_prompt_tokens: int = 512  # longer prompts are left out and counted
  system: str = ""  # system message of the chat template
  instruction: str = ""  # follows the problem in the user's message
  template_args: dict = _field()  # e.g. enable_thinking=False for Qwen3
  num_arithmetic: int = 4096  # problems made for `arithmetic`, train + eval
  max_operations: int = 6  # in an arithmetic problem


@dataclasses.dataclass
class Rollout:
  group_size: int = 8  # G, completions of each prompt
  max_tokens: int = 64  # T, tokens of a completion, stop token included
  num_slots: int = 64  # completions that decode side by side
  prefill_prompts: int = 16  # prompts that prefill side by side
  temperature: float = 1.0  # also divides the trainer's logits
  top_k: int = 0  # 0 keeps every token
  top_p: float = 1.0  # 1 keeps every token
  stop_ids: tuple = ()  # empty asks the checkpoint, then the tokenizer


@dataclasses.dataclass
class Reward:
  kind: str = "exact"  # "exact" compares text; "math" asks math-verify
  format_reward: float = 0.0  # added where the answer is in \boxed{}
  num_workers: int = 2  # grader processes; "exact" needs none
  timeout_seconds: float = 5.0  # wall clock for one completion


@dataclasses.dataclass
class Method:
  name: str = "dppo"  # a key of methods.METHODS
  args: dict = _field()  # of its factory


@dataclasses.dataclass
class Objective:
  name: str = "grpo"  # a key of objectives.OBJECTIVES
  args: dict = _field()  # of its factory, e.g. clip_low, clip_high, beta
  inner_updates: int = 1  # mu, optimizer steps on one rollout
  train_zero_advantage: bool = False  # True pays for terms that are zero


@dataclasses.dataclass
class Pack:
  row_length: int = 128  # L, at least prompt + completion - 1
  rows: int = 16  # rows of one micro-batch
  window: int = 32  # sequences among which the packer chooses
  head_tokens: int = 2048  # tokens whose logits exist at once


@dataclasses.dataclass
class Optimizer:
  """AdamW behind global-norm clipping."""

  learning_rate: float = 1e-6
  schedule: str = "constant"  # after the ramp: constant, linear or cosine
  ramp_steps: int = 0  # from 0 to learning_rate
  weight_decay: float = 0.0
  b1: float = 0.9
  b2: float = 0.999
  clip_norm: float = 1.0


@dataclasses.dataclass
class Warmup:
  """Supervised steps before the first rollout; 0 steps skips them."""

  steps: int = 0
  sequences_per_step: int = 64
  direct_share: float = 0.5  # arithmetic: share of answers without the work
  learning_rate: float = 3e-3


@dataclasses.dataclass
class Eval:
  every: int = 0  # steps; 0 evaluates at the start and at the end only
  samples: int = 0  # of each problem at rollout.temperature; 0 is greedy
  prompts: int = 64  # problems rolled out side by side


@dataclasses.dataclass
class Checkpoint:
  every: int = 0  # steps; 0 saves at the start and at the end only
  keep: int = 2  # newest checkpoints; that of step 0 stays as well


@dataclasses.dataclass
class Mesh:
  data: int = 1  # devices over which prompts, slots and rows are divided
  model: int = 1  # devices over which heads, feed-forward and vocabulary are


@dataclasses.dataclass
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
