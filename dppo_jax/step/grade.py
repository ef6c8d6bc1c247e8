"""Decoding and grading of a rollout."""

import bisect
import collections
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from dppo_jax import data, distributed, rewards
from dppo_jax.algo.advantages import overlong_penalty
from dppo_jax.records import Rollout


class GradedRollout(NamedTuple):
  """Graded completions; the rewards of a pruned prompt are 0.

  Attributes:
    rollout: with lengths up to the first stop string, and `is_stopped` True
      where a stop token or string ended a completion.
    rewards: f32 `[Q, G]`.
    correct: f32 `[Q, G]`, verdict of the verifier, in [0, 1].
    counts: of prompts, slot steps and faults, see `to_metrics`.
    samples: one line of samples.jsonl per sampled completion, with its `row` in
      the rollout and its `member`, the number in its group.
  """

  rollout: Rollout
  rewards: np.ndarray
  correct: np.ndarray
  counts: collections.Counter
  samples: list[dict]


class Ungraded:
  """Grader of completions whose rewards are unknown, or do not matter."""

  def grade(self, prompts: Sequence[str], *unused, **options) -> rewards.Graded:
    zeros = np.zeros(len(prompts), np.float32)
    return rewards.Graded(zeros, zeros, collections.Counter(), {})


def grade(
  rollout: Rollout,
  problems: data.ProblemSet,
  tokenizer: data.Tokenizer,
  grader: rewards.Grader,
  verifier_only: bool = False,
  stop_strings: Sequence[str] = (),
  overlong_tokens: int = 0,
) -> GradedRollout:
  """Decodes and grades the completions of a rollout.

  The processes of a run divide the groups among them and share the grades.

  Args:
    problems: the set that the rollout's prompt ids index.
    verifier_only: leaves out the functions that shape the reward.
    stop_strings: texts that end a completion, see `until_stop`.
    overlong_tokens: length of the ramp of a penalty that is added to the
      reward, see `algo.overlong_penalty`; 0 for none.
  """
  owners = distributed.owners(rollout.lengths)
  host = distributed.to_host(rollout)
  is_sampled = host.lengths.max(axis=1) > 0
  rows = np.flatnonzero(is_sampled & (owners == distributed.index()))
  decode = lambda tokens: until_stop(tokenizer.decode, tokens, stop_strings)
  with distributed.sharing_errors():
    local = _grade_rows(
      host, rows, problems, decode, grader, verifier_only, overlong_tokens
    )
  samples: list[dict] = []
  counts: collections.Counter = collections.Counter(
    prompts=len(owners), slot_steps=int(host.slot_steps)
  )
  for lines, of_process in distributed.gather(local):
    samples += lines
    counts.update(of_process)
  # Each row belongs to one process, with its completions in order.
  samples.sort(key=lambda x: x["row"])
  at = tuple(np.array([x[y] for x in samples], int) for y in ("row", "member"))

  def in_groups(name, dtype=np.float32):
    out = np.zeros(host.lengths.shape, dtype)
    out[at] = [x[name] for x in samples]
    return out

  rollout = rollout.replace(
    lengths=in_groups("tokens", np.int32), is_stopped=in_groups("stopped", bool)
  )
  earned, correct = in_groups("reward"), in_groups("correct")
  return GradedRollout(rollout, earned, correct, counts, samples)


def until_stop(
  decode: Callable[..., str], tokens: np.ndarray, stop_strings: Sequence[str]
) -> tuple[str, int, bool]:
  """Cuts a completion at the stop string that the fewest tokens complete.

  The cut depends on no later token: the tokens that stay are distributed as if
  sampling had stopped there, so that their policy gradient is exact.

  Returns:
    The text before the stop string, the number of tokens with the stop string,
    and True if there is one.
  """
  has_stop = lambda text: any(x in text for x in stop_strings)
  text, num = decode(tokens), len(tokens)
  if not has_stop(text):
    return text, num, False
  num = bisect.bisect_left(
    range(num), True, key=lambda n: has_stop(decode(tokens[:n]))
  )
  text = decode(tokens[:num])
  start = min(text.find(x) for x in stop_strings if x in text)
  return text[:start], num, True


def _grade_rows(
  rollout: Rollout,
  rows: np.ndarray,
  problems: data.ProblemSet,
  decode: Callable[..., tuple[str, int, bool]],
  grader: rewards.Grader,
  verifier_only: bool,
  overlong_tokens: int,
) -> tuple[list[dict], collections.Counter]:
  """Returns samples of the groups of some rows, and counts of outcomes."""
  size, limit = rollout.tokens.shape[1:]
  samples = [
    _decoded(rollout, (row, member), problems, decode)
    for row in rows.tolist()
    for member in range(size)
  ]
  column = lambda name: [x[name] for x in samples]
  graded = grader.grade(
    column("problem"),
    column("completion"),
    column("answer"),
    problems.columns_at(np.repeat(rollout.prompt_ids[rows], size)),
    group_sizes=[size] * len(rows),
    verifier_only=verifier_only,
  )
  earned, total = graded.values, graded.rewards
  if overlong_tokens:
    lengths = np.array(column("tokens"), int)
    penalty = np.asarray(overlong_penalty(lengths, limit, overlong_tokens))
    total, earned = total + penalty, earned | {"overlong": penalty}
  for i, sample in enumerate(samples):
    sample["reward"] = float(total[i])
    sample["rewards"] = {name: float(x[i]) for name, x in earned.items()}
    sample["correct"] = float(graded.correct[i])
  # Each sampled token took one step of a slot.
  sampled = collections.Counter(sampled=int(rollout.lengths[rows].sum()))
  return samples, graded.counts + sampled


def _decoded(
  rollout: Rollout,
  at: tuple[int, int],
  problems: data.ProblemSet,
  decode: Callable[..., tuple[str, int, bool]],
) -> dict[str, Any]:
  """Returns the sample of a row and member, without its grades."""
  row, member = at
  problem = rollout.prompt_ids[row]
  text, num, has_stop = decode(rollout.tokens[at][: rollout.lengths[at]])
  is_used = np.arange(rollout.tokens.shape[2]) < num
  return {
    "row": row,
    "member": member,
    "id": problems.names[problem],
    "problem": problems.problems[problem],
    "completion": text,
    "answer": problems.answers[problem],
    "tokens": num,
    "stopped": has_stop or bool(rollout.is_stopped[at]),
    "logprob": float(np.sum(rollout.logprobs[at] * is_used)),
  }


def to_metrics(
  counts: collections.Counter,
  samples: list[dict],
  group_size: int,
  functions: tuple[rewards.RewardSpec, ...],
) -> dict[str, float]:
  """Returns the metrics of all rollouts of a step.

  Args:
    counts: sum of the counts of the rollouts.
    samples: lines of samples.jsonl of every completion of the step, group after
      group.
  """
  num = len(samples)
  lengths = [x["tokens"] for x in samples]
  total = lambda values: float(np.array([*values], np.float32).sum())
  groups = np.array([x["reward"] for x in samples], np.float32)
  groups = groups.reshape(-1, group_size)
  # Means of large rewards would round their differences away.
  spread = groups - groups.min(axis=1, keepdims=True)
  # A group of one has no standard deviation.
  deviations = spread.std(axis=1, ddof=int(group_size > 1))
  metrics = {
    "prompts/drawn": counts["prompts"],
    "prompts/kept": len(groups),
    "completions/drawn": num,
    "groups/zero_std": int((spread.max(axis=1) == 0).sum()),
    "tokens/generated": sum(lengths),
    "rollout/slot_utilisation": counts["sampled"]
    / max(counts["slot_steps"], 1),
  }
  for name in ("timeouts", "crashes", "errors", "switched_off", "nonfinite"):
    metrics[f"reward/{name}"] = counts[name]
  if not samples:  # every prompt was pruned: there is no mean
    return metrics
  metrics |= {
    "completions/stopped": sum(x["stopped"] for x in samples) / num,
    "tokens/completion_mean": sum(lengths) / num,
    "tokens/completion_min": min(lengths),
    "tokens/completion_max": max(lengths),
    "reward/mean": float(groups.sum()) / num,
    "reward/std": float(deviations.sum()) / len(groups),
    "reward/accuracy": total(x["correct"] for x in samples) / num,
    "reward/unboxed": counts["unboxed"] / num,
    "reward/unparsed": counts["unparsed"] / num,
  }
  parts = {}
  if len(functions) > 1:  # else it is reward/mean
    parts = {x.name: f"reward/functions/{x.name}" for x in functions}
  if "overlong" in samples[0]["rewards"]:
    parts["overlong"] = "reward/overlong"
  for name, metric in parts.items():
    metrics[metric] = total(x["rewards"][name] for x in samples) / num
  return metrics
