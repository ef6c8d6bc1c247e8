"""What looks wrong with a run, from the metrics of its last steps.

`ALARMS` is the table: what is measured, from where on it is wrong, what it
means and what to try. An alarm is told when it first holds and then ever more
rarely. Each step on which it holds has the metric `warnings/NAME`, from which
the report counts.
"""

import collections
from collections.abc import Callable, Mapping
from typing import NamedTuple

Line = Mapping[str, float]

_STEPS_UNTOLD = 50  # after the first time; twice as many after each further


class Recent(NamedTuple):
  """What an alarm may look at.

  Attributes:
    lines: metrics of the last steps, or evaluations, the newest last.
    best: the highest accuracy of any evaluation so far.
    num_updates: optimizer steps on one rollout.
  """

  lines: list[Line]
  best: float
  num_updates: int

  def total(self, *names: str) -> float:
    return sum(line.get(name, 0.0) for line in self.lines for name in names)

  def mean(self, name: str) -> float:
    return self.total(name) / len(self.lines)

  def share(self, names: list[str], of: str) -> float:
    return self.total(*names) / max(self.total(of), 1)

  def is_nothing(self, *names: str) -> float:
    """1 where these metrics are 0 on every line, else 0."""
    found = (line.get(name, 1.0) for line in self.lines for name in names)
    return float(not any(found))


class Alarm(NamedTuple):
  """Something that looks wrong.

  Attributes:
    name: in `warnings/NAME`.
    steps: lines that it looks at; before there are so many it is silent.
    measure: a number that is the higher the worse it is.
    limit: the highest that is in order.
    means: what is wrong; `{value}` is the measure.
    advice: what to try.
    reads: a metric that the lines have which it looks at.
  """

  name: str
  steps: int
  measure: Callable[[Recent], float]
  limit: float
  means: str
  advice: str
  reads: str = "step/seconds"


def _mismatch(recent: Recent) -> float:
  is_on_policy = recent.num_updates == 1
  return recent.mean("update/policy_ratio_max") if is_on_policy else 1.0


def _distance(recent: Recent) -> float:
  is_on_policy = recent.num_updates == 1
  return 1.0 if is_on_policy else recent.mean("update/policy_ratio_max")


def _fall(recent: Recent) -> float:
  """What the newest accuracy has lost of the best, beyond its error."""
  line = recent.lines[-1]
  lost = recent.best - line["eval/accuracy"] - 2 * line["eval/stderr"]
  return lost / recent.best if recent.best else 0.0


ALARMS = (
  Alarm(
    "skipped_update",
    1,
    lambda r: r.mean("update/skipped_in_a_row"),
    0.0,
    "the gradient was not finite and the update was skipped, {value:.0f} in a "
    "row by now; the tenth ends the run",
    "a lower config.optimizer.learning_rate, config.model.dtype=float32, or a "
    "look at update/loss and weights/max in metrics.jsonl",
  ),
  Alarm(
    "no_reward",
    5,
    lambda r: r.is_nothing("reward/mean", "reward/std"),
    0.5,
    "no completion of the last 5 steps earned anything",
    "a look at samples.jsonl. Are the answers right? Then "
    "config.reward.functions does not see it. Is it noise? The policy is "
    "destroyed: start again with a lower config.optimizer.learning_rate. Is it "
    "too hard? Take easier problems or more config.sft.steps",
  ),
  Alarm(
    "nothing_trained",
    5,
    lambda r: r.is_nothing("completions/trained"),
    0.5,
    "no token was trained on in the last 5 steps: within every group all "
    "rewards are equal, or everything was pruned",
    "problems that are neither hopeless nor solved, a larger "
    "config.rollout.group_size, or higher rates in config.method.args; where "
    "rewards fell to 0, a lower config.optimizer.learning_rate from the start",
  ),
  Alarm(
    "accuracy_fell",
    2,
    _fall,
    0.3,
    "held-out accuracy has lost {value:.0%} or more of its best",
    "going on from an earlier checkpoint, with config.sft.from_run=DIR@STEP, "
    "and a lower config.optimizer.learning_rate or some "
    "config.objective.args.beta",
    reads="eval/accuracy",
  ),
  Alarm(
    "zero_variance",
    20,
    lambda r: r.share(["groups/zero_std"], "prompts/kept"),
    0.9,
    "{value:.0%} of groups have zero variance: their completions earn the "
    "same and teach nothing",
    "problems that are neither hopeless nor solved, a larger "
    "config.rollout.group_size, a higher config.rollout.temperature, or a "
    "method that passes over such prompts (greso, neyman)",
  ),
  Alarm(
    "sampler_mismatch",
    10,
    _mismatch,
    2.0,
    "trainer and sampler disagree on the probability of some tokens by a "
    "factor of {value:.1f}, though they have the same weights",
    "config.rollout.dtype=float32 (or empty), config.rollout.top_k=0 and "
    "config.rollout.top_p=1, or config.objective.args.sampler_cap=2",
  ),
  Alarm(
    "far_from_sampler",
    10,
    _distance,
    10.0,
    "between the updates on one rollout the probability of some tokens changes "
    "by a factor of {value:.1f}",
    "fewer config.objective.inner_updates or mini_batches, or a lower "
    "config.optimizer.learning_rate",
  ),
  Alarm(
    "clip_share",
    10,
    lambda r: r.mean("update/clip_share"),
    0.3,
    "{value:.0%} of the trained tokens are clipped and have no gradient",
    "fewer config.objective.inner_updates or mini_batches, a lower "
    "config.optimizer.learning_rate, or a higher "
    "config.objective.args.clip_high",
  ),
  Alarm(
    "large_weights",
    5,
    lambda r: r.mean("weights/max"),
    100.0,
    "some completions count {value:.0f} times: their gradient is noise",
    "rates nearer to 1 in config.method.args, or a floor of the probabilities "
    "where the method has one",
  ),
  Alarm(
    "clipped_norm",
    50,
    lambda r: r.mean("update/clipped_norm"),
    0.95,
    "the gradient was cut to config.optimizer.clip_norm on {value:.0%} of the "
    "last 50 steps: how far a step goes no longer depends on it",
    "a larger config.optimizer.clip_norm, or a lower "
    "config.optimizer.learning_rate where accuracy jumps about",
  ),
  Alarm(
    "unused_experts",
    10,
    lambda r: r.mean("moe/unused"),
    0.5,
    "{value:.0%} of the experts get no token in a step: the routing collapses, "
    "or a step has few tokens",
    "a look at moe/router_entropy: where it falls too, going on from an "
    "earlier checkpoint, with config.sft.from_run=DIR@STEP, and a lower "
    "config.optimizer.learning_rate",
  ),
  Alarm(
    "cut_off",
    10,
    lambda r: 1 - r.mean("completions/stopped"),
    0.5,
    "{value:.0%} of completions reach config.rollout.max_tokens and are cut "
    "off, most before their answer",
    "a larger config.rollout.max_tokens (and config.pack.row_length), "
    "config.reward.overlong_tokens, or the right config.rollout.stop_ids",
  ),
  Alarm(
    "no_box",
    10,
    lambda r: r.mean("reward/unboxed"),
    0.9,
    "{value:.0%} of completions have no boxed answer to compare",
    "asking for it in config.data.instruction, or a reward that looks "
    "elsewhere: config.reward.functions=FILE.py:FUNCTION",
  ),
  Alarm(
    "grading_lost",
    10,
    lambda r: r.share(
      ["reward/timeouts", "reward/crashes"], of="completions/drawn"
    ),
    0.01,
    "{value:.1%} of gradings ran out of time or crashed and earned nothing",
    "a longer config.reward.timeout_seconds, fewer or more of "
    "config.reward.num_workers, or a look at log.txt",
  ),
  Alarm(
    "reward_errors",
    10,
    lambda r: r.share(
      ["reward/errors", "reward/nonfinite"], of="completions/drawn"
    ),
    0.01,
    "{value:.1%} of rewards were errors or not finite and count as 0",
    "mending the reward function: log.txt has its first traceback; "
    "config.reward.on_error=stop ends the run instead",
  ),
)


class Health:
  """Watches the metrics of a run as they are written."""

  def __init__(self, num_updates: int, alarms: tuple[Alarm, ...] = ALARMS):
    self._num_updates, self._alarms = num_updates, alarms
    self._best = 0.0
    self._lines: dict[str, collections.deque[Line]] = {
      kind: collections.deque(
        maxlen=max(alarm.steps for alarm in alarms if alarm.reads == kind)
      )
      for kind in {alarm.reads for alarm in alarms}
    }
    self._quiet_until: dict[str, tuple[int, int]] = {}  # and how long since

  def check(self, step: int, line: Line) -> tuple[dict[str, float], list[str]]:
    """Metrics of the alarms that hold, and what is worth saying of them.

    Args:
      line: the metrics of a step or of an evaluation.
    """
    kinds = [kind for kind in self._lines if kind in line]
    for kind in kinds:
      self._lines[kind].append(line)
    self._best = max(self._best, line.get("eval/accuracy", 0.0))
    metrics, said = {}, []
    for alarm in self._alarms:
      lines = [*self._lines[alarm.reads]][-alarm.steps :]
      if alarm.reads not in kinds or len(lines) < alarm.steps:
        continue
      recent = Recent(lines, self._best, self._num_updates)
      value = alarm.measure(recent)
      if value > alarm.limit:
        metrics[f"warnings/{alarm.name}"] = 1.0
        if self._is_due(alarm.name, step):
          means = alarm.means.format(value=value)
          said.append(f"warning, step {step}: {means}. Try {alarm.advice}.")
    return metrics, said

  def _is_due(self, name: str, step: int) -> bool:
    until, distance = self._quiet_until.get(name, (step, _STEPS_UNTOLD))
    if step < until:
      return False
    self._quiet_until[name] = step + distance, 2 * distance
    return True
