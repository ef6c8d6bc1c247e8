"""Warnings about a run, from the metrics of its last steps.

`CHECKS` is the table. While a check fails, each step has the metric
`warnings/NAME`, which the report counts, and a message is printed at most every
100 steps.
"""

import collections
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

Line = Mapping[str, float]

_MIN_DISTANCE = 100  # steps between two messages of one check


class Check(NamedTuple):
  """A check of the last steps.

  Attributes:
    name: suffix of the metric `warnings/NAME`.
    steps: number of steps to look at.
    value: quantity of their metrics that grows with the problem.
    limit: largest value without a warning.
    message: problem and advice; `{value}` stands for the value.
  """

  name: str
  steps: int
  value: Callable[[Sequence[Line]], float]
  limit: float
  message: str


def _total(lines: Sequence[Line], *names: str, default: float = 0.0) -> float:
  return sum(line.get(name, default) for line in lines for name in names)


_FAILURES = [
  f"reward/{x}" for x in ("timeouts", "crashes", "errors", "nonfinite")
]
CHECKS = (
  Check(
    "skipped_update",
    1,
    lambda x: _total(x, "update/skipped_in_a_row"),
    0,
    "the gradient was not finite and the update was skipped, {value:.0f} in a "
    "row; ten end the run. Lower config.optimizer.learning_rate, or set "
    "config.model.dtype=float32.",
  ),
  Check(
    "no_reward",
    5,
    lambda x: not _total(x, "reward/mean", "reward/std", default=1),
    0,
    "no completion of the last 5 steps earned a reward. See samples.jsonl: if "
    "answers are right, change config.reward.functions; if they are noise, "
    "start again with a lower config.optimizer.learning_rate; otherwise use "
    "easier problems.",
  ),
  Check(
    "nothing_trained",
    5,
    lambda x: not _total(x, "completions/trained", default=1),
    0,
    "no token was trained on in the last 5 steps: all rewards of a group are "
    "equal, or everything was pruned. Use other problems, a larger "
    "config.rollout.group_size or higher rates in config.method.args. If "
    "rewards fell to 0, start again with a lower "
    "config.optimizer.learning_rate.",
  ),
  Check(
    "zero_variance",
    20,
    lambda x: _total(x, "groups/zero_std") / max(_total(x, "prompts/kept"), 1),
    0.9,
    "{value:.0%} of groups have equal rewards and no gradient. Use easier or "
    "harder problems, a larger config.rollout.group_size, a higher "
    "config.rollout.temperature, or a method that skips them, such as greso.",
  ),
  Check(
    "sampler_mismatch",
    10,
    lambda x: _total(x, "update/policy_ratio_max") / len(x),
    2,
    "trainer and sampler have the same weights but disagree on the probability "
    "of a token by a factor of {value:.1f}. Set config.rollout.dtype=float32, "
    "config.rollout.top_k=0 and config.rollout.top_p=1, or "
    "config.objective.args.sampler_cap=2.",
  ),
  Check(
    "large_weights",
    5,
    lambda x: _total(x, "weights/max") / len(x),
    100,
    "a completion has weight {value:.0f}: its gradient is mostly noise. Set "
    "rates closer to 1 in config.method.args.",
  ),
  Check(
    "cut_off",
    10,
    lambda x: 1 - _total(x, "completions/stopped", default=1) / len(x),
    0.5,
    "{value:.0%} of completions are cut off, most before their answer. Raise "
    "config.rollout.max_tokens, or see config.rollout.stop_ids.",
  ),
  Check(
    "reward_failures",
    10,
    lambda x: _total(x, *_FAILURES) / max(_total(x, "completions/drawn"), 1),
    0.01,
    "{value:.1%} of rewards failed and count as 0. See log.txt for the first "
    "traceback, or raise config.reward.timeout_seconds.",
  ),
)


class Health:
  """Applies the checks to the metrics of a run as they are written."""

  def __init__(self, num_updates: int):
    """Takes the number of updates per rollout."""
    # After its first update the policy differs from the sampler's on purpose.
    on_policy = num_updates == 1
    self._checks = [
      x for x in CHECKS if on_policy or x.name != "sampler_mismatch"
    ]
    self._lines = collections.deque(maxlen=max(x.steps for x in CHECKS))
    self._next_message: dict[str, int] = {}

  def check(self, step: int, line: Line) -> tuple[dict[str, float], list[str]]:
    """Returns the metrics of the checks that fail, and messages to print.

    Args:
      line: metrics of a step; those of an evaluation are ignored.
    """
    metrics, messages = {}, []
    if "step/seconds" not in line:
      return metrics, messages
    self._lines.append(line)
    for check in self._checks:
      lines = [*self._lines][-check.steps :]
      value = check.value(lines)
      if len(lines) < check.steps or value <= check.limit:
        continue
      metrics[f"warnings/{check.name}"] = 1.0
      if step >= self._next_message.get(check.name, step):
        self._next_message[check.name] = step + _MIN_DISTANCE
        message = check.message.format(value=value)
        messages.append(f"warning, step {step}: {message}")
    return metrics, messages
