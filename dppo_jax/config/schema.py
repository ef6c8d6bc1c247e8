"""Every option, stated once: default, meaning, unit, range, resume rule.

A config file returns a `Config` and sets what differs from these defaults.
Configs stop at `run/setup.py`: the stages of a step take plain arguments.
"""

# Without `from __future__ import annotations`: config_flags reads the types.
from collections.abc import Callable
from dataclasses import dataclass, field

from dppo_jax import methods
from dppo_jax.algo import objectives
from dppo_jax.config.options import adjustable, default_args, option
from dppo_jax.data import sources
from dppo_jax.files import paths, user_code
from dppo_jax.models import attention, transformer

# Sizes of the randomly initialised model.
TINY = dict(layers=2, embed=64, heads=4, kv_heads=2, head_dim=16, mlp=192)
DTYPES = ("float32", "bfloat16")


@dataclass(slots=True)
class ModelConfig:
  """Checkpoint, or a small random model, to start from."""

  path: str = option(
    "", "directory of a Hugging Face checkpoint", absolute=paths.absolute
  )
  hub_id: str = option("", "Hugging Face model, NAME[@REVISION], without path")
  shape: dict = option(TINY, "sizes of the random model without path, hub_id")
  dtype: str = option("float32", "dtype of the computation", choices=DTYPES)
  remat: str = adjustable(
    "layers",
    "recomputed in the backward pass; dots: all but matmuls",
    choices=tuple(transformer.REMAT),
  )
  attention: str = adjustable(
    "auto", "kernel; splash: TPU, tokamax: GPU", choices=attention.CHOICES
  )

  @property
  def hub_name(self) -> str:
    """`hub_id` without its revision."""
    return self.hub_id.partition("@")[0]


@dataclass(slots=True)
class LoraConfig:
  """Low-rank adapters, trained while the model's weights are frozen."""

  rank: int = option(0, "rank of the adapters; 0: train all weights")
  alpha: float = option(32.0, "alpha / rank scales the adapters", least=0.001)
  targets: str = option("all", "linear layers to adapt: all, or q,k,v,o,...")
  adapter: str = option(
    "", "directory of a PEFT adapter to start from", absolute=paths.absolute
  )


@dataclass(slots=True)
class DataConfig:
  """Problems; see dppo_jax/data/README.md."""

  train: str = option(
    "arithmetic",
    "SOURCE: arithmetic[:NUM[:MAX_OPS]], FILE/DIR, "
    "hf:NAME[@REVISION][:CONFIG[:SPLIT]], tfds:NAME[:SPLIT], FUNCTION",
    is_code=True,
    absolute=sources.absolute,
  )
  eval: str = adjustable(
    "arithmetic",
    "SOURCE or NAME=SOURCE,...",
    is_code=True,
    absolute=sources.absolute,
  )
  eval_limit: int = adjustable(256, "rows to read per eval source; 0: all")
  problem_key: str = option(sources.PROBLEM_KEY, "problem columns, best first")
  answer_key: str = option(sources.ANSWER_KEY, "answer columns, best first")
  prompts_per_step: int = option(16, "N, prompts drawn in a step", least=1)
  max_prompt_tokens: int = option(512, "longer prompts are left out", least=1)
  template: str = option(
    "",
    "prompt, as in 'Q: {problem}', or FUNCTION of a row",
    is_code=True,
    absolute=lambda x: paths.of_code(x) if user_code.is_reference(x) else x,
  )
  template_args: dict = option({}, "arguments of the chat template")


@dataclass(slots=True)
class RolloutConfig:
  """Sampling of completions."""

  group_size: int = option(8, "G, completions per prompt", least=2)
  max_tokens: int = option(64, "T, completion tokens, stop included", least=1)
  num_slots: int = adjustable(
    64, "parallel completions per device; 0: all that fit", least=0
  )
  temperature: float = option(1.0, "of sampler and trainer", least=0.01)
  top_k: int = option(0, "number of likely tokens to sample from; 0: all")
  top_p: float = option(
    1.0, "probability mass to sample from; 1: all", least=0.001, most=1
  )
  stop_ids: tuple = option(
    (), "stop tokens; empty: the checkpoint's", items=int
  )
  stop_strings: tuple = option((), "texts that also end a completion")


@dataclass(slots=True)
class RewardConfig:
  """Rewards of completions."""

  functions: str = option(
    "exact",
    "NAME[:WEIGHT][:batched],...: exact, math, last_number, boxed, FUNCTION; "
    "verifier first",
    is_code=True,
  )
  overlong_tokens: int = option(0, "tokens of DAPO's overlong penalty; 0: none")
  timeout_seconds: float = adjustable(
    5.0, "time limit of a function call in seconds", least=0.001, most=86_400
  )


@dataclass(slots=True)
class MethodConfig:
  """Pruning method."""

  factory: Callable = methods.dppo
  args: dict = option(default_args(methods.dppo), "arguments of the method")

  @property
  def name(self) -> str:
    return self.factory.__name__


@dataclass(slots=True)
class ObjectiveConfig:
  """Loss and number of updates."""

  factory: Callable = objectives.grpo
  args: dict = option(default_args(objectives.grpo), "arguments of the loss")
  inner_updates: int = option(1, "mu, passes over one rollout", least=1)
  mini_batches: int = option(1, "updates per pass, on other prompts", least=1)
  mask_truncated: bool = option(
    False, "leave completions cut at rollout.max_tokens out of the loss"
  )

  @property
  def name(self) -> str:
    return self.factory.__name__


@dataclass(slots=True)
class PackConfig:
  """Packing of completions into rows."""

  row_length: int = option(128, "L, tokens per row, a multiple of 8", least=8)
  rows_per_micro: int = adjustable(16, "micro-batch rows per device", least=1)


@dataclass(slots=True)
class OptimizerConfig:
  """AdamW, or an optimizer of the user's, with global-norm clipping."""

  function: str = option(
    "", "FUNCTION of a learning rate, as optax:lion; empty: AdamW", is_code=True
  )
  learning_rate: float = option(1e-6, "peak learning rate")
  schedule: str = option(
    "constant", "after the warm-up", choices=("constant", "linear", "cosine")
  )
  warmup_steps: int = option(0, "updates of the linear warm-up")
  weight_decay: float = option(0.0, "weight decay, but of norms and biases")
  clip_norm: float = option(
    1.0, "largest gradient norm; 1e9: any", least=0.001, most=1e15
  )


@dataclass(slots=True)
class SftConfig:
  """Supervised fine-tuning before the first rollout."""

  steps: int = option(0, "number of updates; 0, or with from_run: none")
  learning_rate: float = option(
    0.0, "peak rate; 0: 1e-5 of a checkpoint, 3e-3 of random weights"
  )
  from_run: str = option(
    "",
    "RUN, for its weights at step 0, or RUN@STEP, to start from",
    absolute=paths.absolute,
  )

  @property
  def needs_solutions(self) -> bool:
    """True if solutions are imitated; another run's weights need none."""
    return self.steps > 0 and not self.from_run


@dataclass(slots=True)
class EvalConfig:
  """Accuracy on evaluation problems."""

  every: int = adjustable(0, "steps between evaluations; 0: first and last")
  samples: int = adjustable(
    1, "n, samples per problem; 0: greedy only", most=1000
  )


@dataclass(slots=True)
class CheckpointConfig:
  """Checkpoints of the train state."""

  every: int = adjustable(0, "steps between checkpoints; 0: 15 minutes")
  keep: int = adjustable(2, "latest checkpoints to keep; step 0 stays", least=1)
  best: str = adjustable(
    "", "METRIC to keep the best checkpoint by; -METRIC: the lowest"
  )


@dataclass(slots=True)
class LogConfig:
  """Metrics in addition to metrics.jsonl and the report."""

  writers: str = adjustable(
    "tensorboard", "tensorboard, wandb, completions (every one), or ''"
  )


@dataclass(slots=True)
class MeshConfig:
  """Devices."""

  data: int = adjustable(1, "devices for batch and state; -1: all", least=-1)
  model: int = adjustable(1, "devices for heads and features", least=1)
  replicas: int = adjustable(1, "copies of data x model devices", least=1)


@dataclass(slots=True)
class Config:
  """All options of a run."""

  seed: int = option(0, "seed of all randomness", most=2**32 - 1)
  steps: int = adjustable(100, "training steps")
  callbacks: str = adjustable("", "FUNCTION,... after each step", is_code=True)
  model: ModelConfig = field(default_factory=ModelConfig)
  lora: LoraConfig = field(default_factory=LoraConfig)
  data: DataConfig = field(default_factory=DataConfig)
  rollout: RolloutConfig = field(default_factory=RolloutConfig)
  reward: RewardConfig = field(default_factory=RewardConfig)
  method: MethodConfig = field(default_factory=MethodConfig)
  objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
  pack: PackConfig = field(default_factory=PackConfig)
  optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
  sft: SftConfig = field(default_factory=SftConfig)
  eval: EvalConfig = field(default_factory=EvalConfig)
  checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
  log: LogConfig = field(default_factory=LogConfig)
  mesh: MeshConfig = field(default_factory=MeshConfig)
