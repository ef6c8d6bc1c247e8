"""Every option, stated once: default, meaning, unit, range, resume rule.

A config file returns a `Config` and sets what differs from these defaults.
Configs stop at `run/setup.py`: the stages of a step take plain arguments.
"""

# Without `from __future__ import annotations`: config_flags reads the types.
from collections.abc import Callable
from dataclasses import dataclass, field

from dppo_jax import methods
from dppo_jax.algo import objectives
from dppo_jax.config.options import default_args, option
from dppo_jax.data import sources
from dppo_jax.models import attention, transformer

# Sizes of the randomly initialised model.
TINY = dict(layers=2, embed=64, heads=4, kv_heads=2, head_dim=16, mlp=192)


@dataclass(slots=True)
class ModelConfig:
  """Checkpoint, or a small random model, to start from."""

  path: str = option(
    "", "directory with config.json, *.safetensors and tokenizer files"
  )
  hub_id: str = option("", "Hugging Face model to download if path is empty")
  shape: dict = option(
    TINY, "sizes of the random Qwen3 model used if path and hub_id are empty"
  )
  dtype: str = option(
    "float32",
    "dtype of the computation; master weights are float32",
    choices=("float32", "bfloat16"),
  )
  remat: str = option(
    "layers",
    "rematerialisation: layers recomputes everything, dots keeps matmul "
    "outputs, none keeps everything and takes most memory",
    choices=tuple(transformer.REMAT),
    may_change=True,
  )
  attention: str = option(
    "auto",
    "attention kernel: xla runs everywhere, splash on TPU, triton on NVIDIA "
    "GPUs; auto is splash where it is supported, else xla",
    choices=attention.CHOICES,
    may_change=True,
  )


@dataclass(slots=True)
class DataConfig:
  """Problems; see dppo_jax/data/README.md."""

  train: str = option(
    "arithmetic",
    "source of training problems: arithmetic[:NUM[:MAX_OPERATIONS]], a file, "
    "tfds:NAME[:SPLIT], "
    "FILE.py:FUNCTION or MODULE:FUNCTION",
    is_code=True,
  )
  eval: str = option(
    "arithmetic",
    "source of evaluation problems, or NAME=SOURCE,NAME=SOURCE; may be empty",
    is_code=True,
    may_change=True,
  )
  train_limit: int = option(0, "training rows to read; 0 reads all")
  eval_limit: int = option(
    256, "rows to read per evaluation source; 0 reads all", may_change=True
  )
  problem_key: str = option(
    sources.PROBLEM_KEY,
    "columns of the problem (text or messages); the first non-empty one counts",
  )
  answer_key: str = option(
    sources.ANSWER_KEY,
    "columns of the answer; only text after the last #### counts, if any",
  )
  prompts_per_step: int = option(
    16, "N, prompts drawn in a step, before pruning", least=1
  )
  max_prompt_tokens: int = option(
    512, "longest prompt; longer ones are left out and counted", least=1
  )
  template: str = option(
    "",
    "prompt: text with columns in braces, as in 'system: Be brief.\\nuser: "
    "{problem}' or 'Q: {problem}'; or FILE.py:FUNCTION or MODULE:FUNCTION of a "
    "row that returns text or messages; empty is the problem",
    is_code=True,
  )
  template_args: dict = option(
    {}, "arguments of the chat template, e.g. enable_thinking=False for Qwen3"
  )


@dataclass(slots=True)
class RolloutConfig:
  """Sampling of completions."""

  group_size: int = option(8, "G, completions per prompt", least=2)
  max_tokens: int = option(
    64, "T, longest completion in tokens, stop token included", least=1
  )
  num_slots: int = option(
    64,
    "completions decoded in parallel on each device",
    least=1,
    may_change=True,
  )
  dtype: str = option(
    "",
    "dtype of the sampler (default: model.dtype); a different one makes it "
    "slightly off-policy, as update/policy_ratio_max shows",
    choices=("", "float32", "bfloat16"),
  )
  shard_weights: bool = option(
    False,
    "divide the sampler's weights over mesh.data and gather each layer when it "
    "is used, for models that do not fit otherwise",
    may_change=True,
  )
  temperature: float = option(
    1.0, "sampling temperature, also of the trainer's logits", least=0.01
  )
  top_k: int = option(
    0,
    "sample from the k most likely tokens; 0 samples from all. The trainer "
    "does not truncate, so the sampler becomes off-policy",
  )
  top_p: float = option(
    1.0,
    "sample from the most likely tokens with this total probability; "
    "off-policy below 1",
    above=0,
    most=1,
  )
  stop_ids: tuple = option(
    (), "ids of stop tokens; empty uses those of the checkpoint or tokenizer"
  )


@dataclass(slots=True)
class RewardConfig:
  """Rewards of completions."""

  functions: str = option(
    "exact",
    "exact, math, boxed, FILE.py:FUNCTION or MODULE:FUNCTION, separated by "
    "commas, each with an optional :WEIGHT; the first one defines accuracy",
    is_code=True,
  )
  on_error: str = option(
    "zero",
    "effect of an exception in a user's function: zero reward, or stop the run",
    choices=("zero", "stop"),
  )
  overlong_tokens: int = option(
    0,
    "length of DAPO's soft overlong penalty in tokens before "
    "rollout.max_tokens; 0 disables it",
  )
  num_workers: int = option(
    2,
    "grading processes; exact needs none",
    least=1,
    most=1024,
    may_change=True,
  )
  timeout_seconds: float = option(
    5.0,
    "time limit of a function call in seconds",
    above=0,
    most=86_400,
    may_change=True,
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
  inner_updates: int = option(
    1, "mu, passes of the optimizer over one rollout", least=1
  )
  mini_batches: int = option(
    1, "parts of a rollout's prompts; each pass makes one update each", least=1
  )

  @property
  def name(self) -> str:
    return self.factory.__name__

  @property
  def num_updates(self) -> int:
    """Optimizer updates per rollout."""
    return self.inner_updates * self.mini_batches


@dataclass(slots=True)
class PackConfig:
  """Packing of completions into rows."""

  row_length: int = option(
    128, "L, tokens per row; a multiple of 8, at least P + T - 1", least=8
  )
  rows_per_micro: int = option(
    16, "rows per micro-batch on each device", least=1, may_change=True
  )


@dataclass(slots=True)
class OptimizerConfig:
  """AdamW with global-norm clipping."""

  learning_rate: float = option(1e-6, "peak learning rate")
  schedule: str = option(
    "constant",
    "learning rate after the warm-up",
    choices=("constant", "linear", "cosine"),
  )
  warmup_steps: int = option(
    0, "updates over which the learning rate rises from 0"
  )
  weight_decay: float = option(0.0, "weight decay")
  clip_norm: float = option(
    1.0, "largest gradient norm; 1e9 disables clipping", above=0, most=1e15
  )


@dataclass(slots=True)
class SftConfig:
  """Supervised fine-tuning before the first rollout."""

  steps: int = option(0, "number of updates; 0 disables it")
  from_run: str = option(
    "",
    "run whose initial weights are used instead, or RUN@STEP for the weights "
    "of a later checkpoint",
  )

  @property
  def needs_solutions(self) -> bool:
    """True if solutions are imitated; another run's weights need none."""
    return self.steps > 0 and not self.from_run


@dataclass(slots=True)
class EvalConfig:
  """Accuracy on evaluation problems."""

  every: int = option(
    0, "steps between evaluations; 0 is only first and last", may_change=True
  )
  samples: int = option(
    0,
    "k, completions per problem for avg@k, maj@k and pass@k; 0 decodes "
    "greedily, which --mode=evaluate always does too",
    most=1000,
    may_change=True,
  )
  top_p: float = option(
    0.0, "top_p of samples; 0 is rollout.top_p", most=1, may_change=True
  )
  prompts: int = option(64, "problems per batch", least=1, may_change=True)


@dataclass(slots=True)
class CheckpointConfig:
  """Checkpoints of the train state."""

  every: int = option(
    0, "steps between checkpoints; 0 is only first and last", may_change=True
  )
  keep: int = option(
    2,
    "latest checkpoints to keep; step 0 always stays",
    least=1,
    may_change=True,
  )


@dataclass(slots=True)
class LogConfig:
  """Metrics in addition to metrics.jsonl and the report."""

  writers: str = option(
    "tensorboard", "tensorboard, wandb, trackio or empty", may_change=True
  )


@dataclass(slots=True)
class MeshConfig:
  """Devices."""

  data: int = option(
    1,
    "devices that divide prompts, slots, rows and the train state; -1 is all "
    "that are left",
    least=-1,
    may_change=True,
  )
  model: int = option(
    1,
    "devices that divide heads, feed-forward layers and the vocabulary",
    least=1,
    may_change=True,
  )
  replicas: int = option(
    1,
    "groups of data x model devices, such as the slices of a pod; each holds "
    "the full state, and all divide prompts, slots and rows",
    least=1,
    may_change=True,
  )


@dataclass(slots=True)
class Config:
  """All options of a run."""

  seed: int = option(0, "seed of all randomness", most=2**32 - 1)
  steps: int = option(100, "training steps", may_change=True)
  callbacks: str = option(
    "",
    "functions called after each step: FILE.py:FUNCTION or MODULE:FUNCTION, "
    "separated by commas",
    is_code=True,
    may_change=True,
  )
  model: ModelConfig = field(default_factory=ModelConfig)
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
