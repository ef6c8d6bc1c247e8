"""Every option, stated once: default, meaning, unit, range, resume rule.

Here are those of what is learned, in `running.py` those of how it is gone
about. Nothing below `setup_run.py` sees a config: the stages take plain
arguments. A config file returns a `Config` and says how it differs from these.
"""

# Without `from __future__ import annotations`: config_flags reads the types.
from collections.abc import Callable
import dataclasses

from dppo_jax import methods
from dppo_jax.algo import objectives
from dppo_jax.config.options import default_args, option
from dppo_jax.config.running import Checkpoint, Log, Mesh, Pack, Rollout
from dppo_jax.data import sources
from dppo_jax.models import attention, transformer


@dataclasses.dataclass(slots=True)
class Model:
  """A checkpoint to start from or, with neither path nor hub_id, a shape."""

  path: str = option(
    "", "directory with config.json, *.safetensors and tokenizer files"
  )
  hub_id: str = option("", "fetched with huggingface_hub where path is empty")
  layers: int = option(
    2, "layers of a Qwen3 model made on the spot", least=1, most=1000
  )
  embed: int = option(64, "its width", least=1, most=65_536)
  heads: int = option(4, "its query heads", least=1, most=1024)
  kv_heads: int = option(2, "its key and value heads", least=1, most=1024)
  head_dim: int = option(16, "width of a head", least=2, most=1024)
  mlp: int = option(
    192, "width of its feed-forward layers", least=1, most=1_000_000
  )
  dtype: str = option(
    "float32",
    "of the computation; master weights are float32",
    choices=("float32", "bfloat16"),
  )
  remat: str = option(
    "layers",
    "remat policy: layers recomputes all, dots keeps matmul outputs, none "
    "recomputes nothing; each takes more memory than the one before",
    choices=tuple(transformer.REMAT),
    may_change=True,
  )
  attention: str = option(
    "auto",
    "xla runs everywhere, splash on TPU, triton on NVIDIA; auto takes splash "
    "where it can",
    choices=attention.CHOICES,
    may_change=True,
  )


@dataclasses.dataclass(slots=True)
class Data:
  """Problems to train and to evaluate on.

  A source is `arithmetic[:NUM[:MAX_OPERATIONS]]` (generated sums, 4096 of up to
  6 operations by default, one in eight held out for `eval`), a file (.jsonl,
  .jsonl.gz or .parquet), `tfds:NAME[:SPLIT]`, or FILE.py:FUNCTION or
  MODULE:FUNCTION that returns an iterable of dicts (from Python also the
  function itself). A `_key` is a list of column names, of which the first with
  a value counts; `a.b` is key b of the dict in column a.
  """

  train: str = option(
    "arithmetic", "source of the problems to train on", is_code=True
  )
  eval: str = option(
    "arithmetic",
    "source to evaluate on, or NAME=SOURCE,NAME=SOURCE; empty for none; "
    "arithmetic is the held-out part of an arithmetic train source",
    is_code=True,
    may_change=True,
  )
  train_limit: int = option(0, "maximum number of rows; 0 reads all", least=0)
  eval_limit: int = option(
    256,
    "maximum number of rows of each source; 0 reads all",
    least=0,
    may_change=True,
  )
  problem_key: str = option(
    sources.PROBLEM_KEY, "columns of the problem: text or messages"
  )
  answer_key: str = option(
    sources.ANSWER_KEY,
    "columns of the answer; only the text after its last #### counts",
  )
  prompts_per_step: int = option(
    16,
    "N, prompts drawn in a step, before any is pruned",
    least=1,
    most=1_000_000,
  )
  max_prompt_tokens: int = option(
    512, "limit above which rows are left out", least=1, most=1_000_000
  )
  template: str = option(
    "",
    "the prompt: text with columns in braces, as in 'system: Be brief.\\nuser: "
    "{problem}' or 'Q: {problem}'; or FILE.py:FUNCTION or MODULE:FUNCTION of a "
    "row that returns text or messages; empty is the problem",
    is_code=True,
  )
  template_args: dict = option(
    {},
    "arguments of the chat template, e.g. enable_thinking=False for Qwen3",
  )


@dataclasses.dataclass(slots=True)
class Reward:
  """What a completion earns."""

  functions: str = option(
    "exact",
    "exact, math, boxed, FILE.py:FUNCTION or MODULE:FUNCTION, each perhaps "
    "with :WEIGHT, separated by commas; the first says what is correct",
    is_code=True,
  )
  on_error: str = option(
    "zero",
    "what a user's function that fails costs: its reward, or the run",
    choices=("zero", "stop"),
  )
  overlong_tokens: int = option(
    0,
    "length of DAPO's soft overlong ramp, in tokens before rollout.max_tokens; "
    "0 disables it",
    least=0,
    most=1_000_000,
  )
  num_workers: int = option(
    2,
    "processes that grade; exact needs none",
    least=1,
    most=1024,
    may_change=True,
  )
  timeout_seconds: float = option(
    5.0,
    "wall clock for one call of a function",
    above=0,
    most=86_400,
    may_change=True,
  )


@dataclasses.dataclass(slots=True)
class Method:
  """What is chosen; named after the config's file, as in FILE.py:dppo."""

  factory: Callable = methods.dppo
  args: dict = option(default_args(methods.dppo), "of the factory")

  @property
  def name(self) -> str:
    return self.factory.__name__


@dataclasses.dataclass(slots=True)
class Objective:
  """What is optimised; named after the method, as in FILE.py:dppo,gspo."""

  factory: Callable = objectives.grpo
  args: dict = option(default_args(objectives.grpo), "of the factory")
  inner_updates: int = option(
    1, "mu, passes of the optimizer over one rollout", least=1, most=1000
  )
  mini_batches: int = option(
    1,
    "parts of the prompts of a rollout, each an update of every pass",
    least=1,
    most=1000,
  )

  @property
  def name(self) -> str:
    return self.factory.__name__

  @property
  def num_updates(self) -> int:
    """Optimizer updates on one rollout."""
    return self.inner_updates * self.mini_batches


@dataclasses.dataclass(slots=True)
class Optimizer:
  """AdamW behind global-norm clipping."""

  learning_rate: float = option(1e-6, "peak", least=0, most=1e6)
  schedule: str = option(
    "constant", "after the warm-up", choices=("constant", "linear", "cosine")
  )
  warmup_steps: int = option(
    0,
    "updates, inner ones too, from 0 to learning_rate",
    least=0,
    most=10**9,
  )
  weight_decay: float = option(0.0, "AdamW's", least=0, most=1e6)
  b1: float = option(0.9, "decay of the first moment", least=0, below=1)
  b2: float = option(0.999, "decay of the second moment", least=0, below=1)
  clip_norm: float = option(
    1.0,
    "largest norm of a gradient; a large one, such as 1e9, clips nothing",
    above=0,
    most=1e15,
  )


@dataclasses.dataclass(slots=True)
class Sft:
  """Supervised fine-tuning before the first rollout; 0 steps skips it."""

  steps: int = option(0, "updates", least=0)
  from_run: str = option(
    "",
    "workdir of a run whose first weights, those of step 0, are taken instead "
    "of steps; RUN@STEP takes those of another of its checkpoints",
  )
  sequences_per_step: int = option(
    64, "solutions in an update", least=1, most=1_000_000
  )
  direct_share: float = option(
    0.5, "share of answers without the work", least=0, most=1
  )
  learning_rate: float = option(3e-3, "peak", least=0, most=1e6)

  @property
  def needs_solutions(self) -> bool:
    """Whether solutions are imitated: another run's weights need none."""
    return self.steps > 0 and not self.from_run


@dataclasses.dataclass(slots=True)
class Eval:
  """Accuracy on problems that are not trained on."""

  every: int = option(
    0,
    "steps; 0 evaluates at the start and at the end only",
    least=0,
    may_change=True,
  )
  samples: int = option(
    0,
    "k, completions sampled per problem for avg@k, maj@k and pass@k; 0 decodes "
    "greedily, which --mode=evaluate always does too",
    least=0,
    most=1000,
    may_change=True,
  )
  top_p: float = option(
    0.0,
    "of those samples; 0 is rollout.top_p",
    least=0,
    most=1,
    may_change=True,
  )
  prompts: int = option(
    64,
    "problems rolled out side by side",
    least=1,
    most=1_000_000,
    may_change=True,
  )


@dataclasses.dataclass(slots=True)
class Config:
  """All options of a run."""

  seed: int = option(0, "where all randomness starts", least=0, most=2**32 - 1)
  steps: int = option(
    100, "updates after supervised fine-tuning", least=0, may_change=True
  )
  model: Model = dataclasses.field(default_factory=Model)
  data: Data = dataclasses.field(default_factory=Data)
  rollout: Rollout = dataclasses.field(default_factory=Rollout)
  reward: Reward = dataclasses.field(default_factory=Reward)
  method: Method = dataclasses.field(default_factory=Method)
  objective: Objective = dataclasses.field(default_factory=Objective)
  pack: Pack = dataclasses.field(default_factory=Pack)
  optimizer: Optimizer = dataclasses.field(default_factory=Optimizer)
  sft: Sft = dataclasses.field(default_factory=Sft)
  eval: Eval = dataclasses.field(default_factory=Eval)
  checkpoint: Checkpoint = dataclasses.field(default_factory=Checkpoint)
  log: Log = dataclasses.field(default_factory=Log)
  mesh: Mesh = dataclasses.field(default_factory=Mesh)
