"""The options of how a run goes about its task: sampling, rows, devices."""

# Without `from __future__ import annotations`: config_flags reads the types.
import dataclasses

from dppo_jax.config.options import option


@dataclasses.dataclass(slots=True)
class Rollout:
  """How completions are sampled."""

  group_size: int = option(
    8, "G, completions of each prompt", least=2, most=65_536
  )
  max_tokens: int = option(
    64,
    "T, tokens of a completion, stop token included",
    least=1,
    most=1_000_000,
  )
  num_slots: int = option(
    64,
    "completions that decode side by side on each device",
    least=1,
    most=1_000_000,
    may_change=True,
  )
  prefill_batch: int = option(
    16,
    "prompts that prefill side by side on each device",
    least=1,
    most=1_000_000,
    may_change=True,
  )
  dtype: str = option(
    "",
    "of the sampler's computation; empty is model.dtype. Another one takes the "
    "sampler a little off policy, as update/policy_ratio_max shows",
    choices=("", "float32", "bfloat16"),
  )
  shard_weights: bool = option(
    False,
    "the sampler's weights are divided over mesh.data too, and each layer is "
    "gathered whenever it is used: for a model that does not fit otherwise",
    may_change=True,
  )
  temperature: float = option(
    1.0, "also divides the trainer's logits", least=0.01, most=100
  )
  top_k: int = option(
    0,
    "sample among the k likeliest tokens; 0 keeps every token. The trainer's "
    "distribution is not truncated, so the sampler is then off policy",
    least=0,
  )
  top_p: float = option(
    1.0,
    "sample among the likeliest tokens of this probability; off policy as "
    "top_k is where below 1",
    above=0,
    most=1,
  )
  stop_ids: tuple = option((), "empty asks the checkpoint, then the tokenizer")


@dataclasses.dataclass(slots=True)
class Pack:
  """How completions are laid out in rows."""

  row_length: int = option(
    128,
    "L, tokens of a row, at least prompt + completion - 1",
    least=8,
    most=1_000_000,
  )
  rows_per_micro: int = option(
    16,
    "rows of one micro-batch on each device",
    least=1,
    most=1_000_000,
    may_change=True,
  )
  window: int = option(
    64,
    "sequences among which the packer chooses",
    least=1,
    most=1_000_000,
    may_change=True,
  )
  share_prefix: bool = option(
    True, "neighbours of one prompt share its tokens", may_change=True
  )
  logit_chunk: int = option(
    2048, "tokens whose logits exist at once", least=1, may_change=True
  )


@dataclasses.dataclass(slots=True)
class Checkpoint:
  """When the train state is saved."""

  every: int = option(
    0,
    "steps; 0 saves at the start and at the end only",
    least=0,
    may_change=True,
  )
  minutes: float = option(
    0.0,
    "also after the step that is the first to end so long after the newest "
    "checkpoint; 0 asks no clock",
    least=0,
    may_change=True,
  )
  keep: int = option(
    2,
    "newest checkpoints; that of step 0 stays as well. With one alone, nothing "
    "but step 0 is left where it turns out to be damaged",
    least=1,
    may_change=True,
  )
  keep_every: int = option(
    0,
    "of those older ones, keep what is saved at multiples of so many steps; "
    "0 keeps none",
    least=0,
    may_change=True,
  )


@dataclasses.dataclass(slots=True)
class Log:
  """Where numbers go beside metrics.jsonl and the report."""

  writers: str = option(
    "tensorboard",
    "tensorboard, wandb, separated by commas, or empty; wandb is installed "
    "with pip and configured by its own variables, such as WANDB_PROJECT",
    may_change=True,
  )


@dataclasses.dataclass(slots=True)
class Mesh:
  """How many devices, and for what."""

  data: int = option(
    1,
    "devices over which prompts, slots and rows are divided, and the state of "
    "training; -1 takes all that the others leave",
    least=-1,
    may_change=True,
  )
  model: int = option(
    1,
    "devices over which heads, feed-forward layers and vocabulary are divided",
    least=1,
    may_change=True,
  )
  replicas: int = option(
    1,
    "groups of data x model devices, such as slices of a pod; each holds the "
    "whole state, and prompts, slots and rows are divided over all",
    least=1,
    may_change=True,
  )
