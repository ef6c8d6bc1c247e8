"""Results of the stages of a step, and its metrics."""

from collections.abc import Mapping, Sequence
import statistics
import types
from typing import Any, NamedTuple

import jax
import numpy as np

from dppo_jax import rewards
from dppo_jax.records import CompletionSummary, PackedBatch
from dppo_jax.step import grade
from dppo_jax.step.collect import Experience
from dppo_jax.step.select import Forecast

# Metrics of the parts of a rollout that are added, per pass.
_SUMS = {
  "completions/kept",
  "completions/trained",
  "pack/rows",
  "pack/unplaced",
  "tokens/invalid_probs",
  "tokens/trained",
  "update/micro_batches",
  "weights/ess",
  "weights/invalid_probs",
}
_OF_TOKENS = {f"update/{x}" for x in "logprob entropy kl clip_share".split()}
_FIRST = {"update/sampler_ratio_max"}  # the policy is still the sampler's
_LAST = {"update/grad_norm", "update/nonfinite_params", "update/skipped"}
_MAX = {"update/skipped_in_a_row"}


class Batch(NamedTuple):
  """Weighted and packed completions of one update.

  Attributes:
    rows: micro-batches `[M, R, L]`.
    num_micro: micro-batches in use.
    denominator: loss denominator, in completions before pruning.
    metrics: of the choice of completions and tokens, and of packing.
    summary: each completion of this part of the rollout.
    forecast: what other budgets would add and cost, where it is due.
  """

  rows: PackedBatch
  num_micro: np.integer
  denominator: np.floating
  metrics: dict[str, Any]
  summary: CompletionSummary
  forecast: Forecast | None = None


class StepInfo(NamedTuple):
  """Results of a step on the host, for metrics, callbacks and checks.

  Attributes:
    batches: what each update trained on.
    updates: metrics of each update on the rollout.
    mini_batches: parts of a rollout; batch `i` has part `i % mini_batches`.
    scalars: further metrics by name, such as the seconds of the stages.
    evaluation: metrics of the last evaluation before the step, by name.
  """

  experience: Experience
  batches: Sequence[Batch]
  updates: Sequence[dict[str, Any]]
  mini_batches: int
  scalars: dict[str, float]
  evaluation: Mapping[str, float] = types.MappingProxyType({})

  @property
  def summary(self) -> CompletionSummary:
    """Summary of each completion, `[Q, G]`, as in the first pass."""
    parts = [batch.summary for batch in self.batches[: self.mini_batches]]
    return jax.tree.map(
      lambda *x: np.stack(x, axis=1).reshape(-1, *x[0].shape[1:]), *parts
    )

  def metrics(self, specs: tuple[rewards.RewardSpec, ...]) -> dict[str, Any]:
    """Returns the metrics of the step by name; each of `specs` has one."""
    experience = self.experience
    stages = [
      batch.metrics | update | {"update/micro_batches": float(batch.num_micro)}
      for batch, update in zip(self.batches, self.updates, strict=True)
    ]
    return {
      **grade.to_metrics(
        experience.counts,
        experience.samples,
        experience.rewards.shape[1],
        specs,
      ),
      **combined(stages, passes=len(stages) // self.mini_batches),
      **self.scalars,
    }


def combined(updates: Sequence[dict[str, Any]], passes: int) -> dict[str, Any]:
  """Combines the metrics of the updates on a rollout.

  Those in `_SUMS` are added up over a pass, those in `_FIRST` and `_LAST` are
  of one update, and those in `_MAX` and names that end in max or min keep the
  extreme. Others are
  means over the updates, those in `_OF_TOKENS` over their tokens.
  """
  if len(updates) == 1:
    return dict(updates[0])
  values = {}
  tokens = [float(update["tokens/trained"]) for update in updates]
  for name in updates[0]:
    x = [float(update[name]) for update in updates]
    end = name.rpartition("/")[2]
    if name in _SUMS:
      values[name] = sum(x) / passes
    elif name in _FIRST:
      values[name] = x[0]
    elif name in _LAST:
      values[name] = x[-1]
    elif name in _MAX or end.endswith("max"):
      values[name] = max(x)
    elif end.endswith("min"):
      values[name] = min(x)
    else:
      is_weighted = name in _OF_TOKENS and any(tokens)
      values[name] = statistics.fmean(x, tokens if is_weighted else None)
  return values
