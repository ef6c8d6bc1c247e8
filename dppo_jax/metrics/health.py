"""Warnings about a run, from the metrics of its last steps.

While a check of the table `CHECKS` fails, each step has the metric
`warnings/NAME`, and a message is printed at most every 100 steps.
"""

import collections
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from dppo_jax.analysis.runs import SCALE_LIMIT

Line = Mapping[str, float]


class Check(NamedTuple):
  """Fails if `value` of the metrics of the last `steps` exceeds `limit`."""

  name: str
  value: Callable[[Sequence[Line]], float]
  message: str  # problem and advice
  limit: float = 0
  steps: int = 10


def _sum(lines: Sequence[Line], names: str, default: float = 0.0) -> float:
  return sum(x.get(name, default) for x in lines for name in names.split())


def _sampler_ratio(lines: Sequence[Line]) -> float:
  """Mean of the largest ratio, from the update or an earlier scoring pass."""
  names = "update/sampler_ratio_max", "tokens/sampler_ratio_max"
  largest = [max(line.get(name, 0.0) for name in names) for line in lines]
  return sum(largest) / len(lines)


def _noise_scale(lines: Sequence[Line]) -> float:
  """Returns the last gradient noise scale in prompts; 0 if it is unknown."""
  scale = lines[-1].get("noise/scale", 0.0)
  return scale if scale < SCALE_LIMIT else 0.0


_FAILURES = (
  "reward/timeouts reward/crashes reward/errors reward/switched_off "
  "reward/nonfinite"
)
CHECKS = (
  Check(
    "skipped_update",
    lambda x: _sum(x, "update/skipped_in_a_row"),
    "the gradient was not finite and the update was skipped, {value:.0f} in a "
    "row; ten end the run. Lower config.optimizer.learning_rate.",
    steps=1,
  ),
  Check(
    "no_reward",
    lambda x: not _sum(x, "reward/accuracy", default=1),
    "no completion of the last 10 steps was right. See samples.jsonl: if "
    "answers are right, change config.reward.functions; if they are noise, "
    "start again with a lower config.optimizer.learning_rate.",
  ),
  Check(
    "nothing_trained",
    lambda x: not _sum(x, "completions/trained", default=1),
    "no token was trained on in the last 10 steps: rewards are equal within "
    "groups, or everything was pruned. Use other problems, a larger "
    "config.rollout.group_size, or prune less "
    "(config.method.args{prune_less}).",
  ),
  Check(
    "zero_variance",
    lambda x: _sum(x, "groups/zero_std") / max(_sum(x, "prompts/kept"), 1),
    "{value:.0%} of groups have equal rewards and no gradient. Use other "
    "problems, a larger config.rollout.group_size, or greso, which skips them.",
    limit=0.9,
  ),
  Check(
    "sampler_mismatch",
    _sampler_ratio,
    "trainer and sampler disagree on the probability of a token by a factor of "
    "{value:.1f}. Set config.model.dtype=float32, config.rollout.top_k=0 and "
    "config.rollout.top_p=1, or config.objective.args.sampler_cap=2.",
    limit=2,
  ),
  Check(
    "reuse",
    lambda x: _noise_scale(x) / max(_sum(x[-1:], "prompts/drawn"), 1),
    "the gradient noise scale is {value:.0f} times the prompts of a rollout: "
    "several updates on it cannot pay. Set config.objective.inner_updates and "
    "config.objective.mini_batches to 1.",
    limit=1,
  ),
  Check(
    "large_weights",
    lambda x: _sum(x, "weights/max") / len(x),
    "a completion has weight {value:.0f}: its gradient is mostly noise. Prune "
    "less (config.method.args{prune_less}).",
    limit=100,
  ),
  Check(
    "cut_off",
    lambda x: 1 - _sum(x, "completions/stopped", default=1) / len(x),
    "{value:.0%} of completions are cut off, most before their answer. Raise "
    "config.rollout.max_tokens, or see config.rollout.stop_ids.",
    limit=0.5,
  ),
  Check(
    "reward_failures",
    lambda x: _sum(x, _FAILURES) / max(_sum(x, "completions/drawn"), 1),
    "reward functions failed {value:.2f} times a completion, and each failure "
    "counts as 0. See log.txt for the cause, or raise "
    "config.reward.timeout_seconds.",
    limit=0.01,
  ),
)


class Health:
  """Applies the checks to the metrics of a run as they are written."""

  def __init__(self, num_updates: int, prune_less: str = ""):
    """Starts without metrics.

    Args:
      num_updates: updates on a rollout.
      prune_less: advice of the method, as in `methods.Method`.
    """
    self._advice = f": {prune_less}" * bool(prune_less)
    self._checks = [x for x in CHECKS if x.name != "reuse" or num_updates > 1]
    self._lines: collections.deque[Line] = collections.deque(maxlen=10)
    self._next_message: dict[str, int] = {}

  def check(self, step: int, line: Line) -> tuple[dict[str, float], list[str]]:
    """Returns the metrics of the checks that fail, and messages to print."""
    metrics: dict[str, float] = {}
    messages: list[str] = []
    if "step/seconds" not in line:  # of an evaluation
      return metrics, messages
    self._lines.append(line)
    for check in self._checks:
      lines = [*self._lines][-check.steps :]
      value = check.value(lines)
      if len(lines) == check.steps and value > check.limit:
        metrics[f"warnings/{check.name}"] = 1.0
        if step >= self._next_message.get(check.name, step):
          self._next_message[check.name] = step + 100
          text = check.message.format(value=value, prune_less=self._advice)
          messages.append(f"warning, step {step}: {text}")
    return metrics, messages
