"""Decoding and grading of a rollout."""

import bisect
import collections
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from dppo_jax import data, distributed, rewards
from dppo_jax.records import Rollout


class GradedRollout(NamedTuple):
  """Graded completions; the rewards of a pruned prompt are 0.

  Attributes:
    rewards: f32 `[Q, G]`.
    correct: f32 `[Q, G]`, verdict of the verifier, in [0, 1].
    counts: sums that describe them.
    samples: one line of samples.jsonl per sampled completion, with its `row` in
      the rollout and its `member`, the number in its group.
    lengths: `[Q, G]`, tokens up to the first stop string.
    is_stopped: `[Q, G]`, True where a stop token or string ended it.
  """

  rewards: np.ndarray
  correct: np.ndarray
  counts: collections.Counter
  samples: list[dict]
  lengths: np.ndarray
  is_stopped: np.ndarray


def grade(
  rollout: Rollout,
  problems: data.ProblemSet,
  tokenizer: data.Tokenizer,
  grader: rewards.Grader,
  verifier_only: bool = False,
  stop_strings: Sequence[str] = (),
) -> GradedRollout:
  """Decodes and grades the completions of a rollout.

  The processes of a run divide the groups among them and share the grades.

  Args:
    problems: the set that the rollout's prompt ids index.
    verifier_only: leaves out the functions that shape the reward.
    stop_strings: texts that end a completion, see `until_stop`.
  """
  owners = distributed.owners(rollout.lengths)
  rollout = distributed.to_host(rollout)
  is_sampled = rollout.lengths.max(axis=1) > 0
  rows = np.flatnonzero(is_sampled & (owners == distributed.index()))
  decode = lambda tokens: until_stop(tokenizer.decode, tokens, stop_strings)
  with distributed.sharing_errors():
    local = _grade_rows(rollout, rows, problems, decode, grader, verifier_only)
  samples: list[dict] = []
  counts: collections.Counter = collections.Counter()
  for lines, of_process in distributed.gather(local):
    samples += lines
    counts.update(of_process)
  # Each row belongs to one process, with its completions in order.
  return _summarise(rollout, sorted(samples, key=lambda x: x["row"]), counts)


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
  decode: Callable[[np.ndarray], tuple[str, int, bool]],
  grader: rewards.Grader,
  verifier_only: bool,
) -> tuple[list[dict], collections.Counter]:
  """Returns samples of the groups of some rows, and counts of outcomes."""
  size = rollout.lengths.shape[1]
  at = np.repeat(rows, size), np.tile(np.arange(size), len(rows))
  ids = rollout.prompt_ids[at[0]]
  tokens, sampled = rollout.tokens[at], rollout.lengths[at]
  decoded = [decode(x[:n]) for x, n in zip(tokens, sampled, strict=True)]
  completions = [text for text, *_ in decoded]
  lengths = np.array([num for _, num, _ in decoded], int)
  is_stopped = rollout.is_stopped[at] | np.array([x for *_, x in decoded], bool)
  is_used = np.arange(tokens.shape[1]) < lengths[:, None]
  prompts = [problems.problems[i] for i in ids]
  answers = [problems.answers[i] for i in ids]
  graded = grader.grade(
    prompts,
    completions,
    answers,
    problems.columns_at(ids),
    group_sizes=[size] * len(rows),
    verifier_only=verifier_only,
  )
  earned = {name: x.tolist() for name, x in graded.values.items()}
  samples = {
    "row": at[0].tolist(),
    "member": at[1].tolist(),
    "id": [problems.names[i] for i in ids],
    "problem": prompts,
    "completion": completions,
    "answer": answers,
    "tokens": lengths.tolist(),
    "stopped": is_stopped.tolist(),
    "logprob": (rollout.logprobs[at] * is_used).sum(1).tolist(),
    "reward": graded.rewards.tolist(),
    "rewards": _lines(earned, len(ids)),
    "correct": graded.correct.tolist(),
  }
  return _lines(samples, len(ids)), graded.counts


def _lines(columns: dict[str, list], num: int) -> list[dict]:
  """Returns `num` dicts, with one entry of each column."""
  return [{name: x[i] for name, x in columns.items()} for i in range(num)]


def _summarise(
  rollout: Rollout, samples: list[dict], counts: collections.Counter
) -> GradedRollout:
  """Arranges grades by group, and adds sums of them to `counts`."""
  shape = rollout.lengths.shape
  at = tuple(np.array([x[y] for x in samples], int) for y in ("row", "member"))

  def in_groups(name, dtype=np.float32):
    out = np.zeros(shape, dtype)
    out[at] = [x[name] for x in samples]
    return out

  earned, correct = in_groups("reward"), in_groups("correct")
  groups = earned[np.unique(at[0])]
  counts.update(
    {
      "prompts": shape[0],
      "rolled_out": len(groups),
      "zero_std": int((groups.max(axis=1) == groups.min(axis=1)).sum()),
      "completions": len(samples),
      "stopped": sum(sample["stopped"] for sample in samples),
      "tokens": sum(sample["tokens"] for sample in samples),
      "slot_steps": int(rollout.slot_steps),
      "busy_steps": int(rollout.busy_steps),
      "earned": float(earned.sum()),
      # Summed over groups; a group of one has no standard deviation.
      "std": float(groups.std(axis=1, ddof=int(shape[1] > 1)).sum()),
      "correct": float(correct.sum()),
    }
  )
  for name in samples[0]["rewards"] if samples else ():
    values = np.array([x["rewards"][name] for x in samples], np.float32)
    counts.update({f"earned/{name}": float(values.sum())})
  return GradedRollout(
    earned,
    correct,
    counts,
    samples,
    lengths=in_groups("tokens", np.int32),
    is_stopped=in_groups("stopped", bool),
  )


def to_metrics(
  counts: collections.Counter,
  samples: list[dict],
  functions: tuple[rewards.RewardSpec, ...],
) -> dict[str, float]:
  """Returns the metrics of all rollouts of a step.

  Args:
    counts: sum of the counts of the rollouts.
    samples: lines of samples.jsonl of every completion of the step.
  """
  num = max(counts["completions"], 1)
  ratio = lambda x, y: counts[x] / max(counts[y], 1)
  lengths = [sample["tokens"] for sample in samples]
  metrics = {
    "prompts/drawn": counts["prompts"],
    "prompts/kept": counts["rolled_out"],
    "completions/drawn": counts["completions"],
    "completions/stopped": counts["stopped"] / num,
    "groups/zero_std": counts["zero_std"],
    "tokens/generated": counts["tokens"],
    "tokens/completion_mean": counts["tokens"] / num,
    "tokens/completion_min": min(lengths, default=0),
    "tokens/completion_max": max(lengths, default=0),
    "rollout/slot_utilisation": ratio("busy_steps", "slot_steps"),
    "rollout/tokens_per_step": ratio("tokens", "busy_steps"),
    "reward/mean": counts["earned"] / num,
    "reward/std": counts["std"] / max(counts["rolled_out"], 1),
    "reward/accuracy": counts["correct"] / num,
    "reward/unboxed": counts["unboxed"] / num,
    "reward/unparsed": counts["unparsed"] / num,
    "reward/timeouts": counts["timeouts"],
    "reward/crashes": counts["crashes"],
    "reward/errors": counts["errors"],
    "reward/switched_off": counts["switched_off"],
    "reward/nonfinite": counts["nonfinite"],
  }
  if len(functions) > 1:  # else it is reward/mean
    for spec in functions:
      mean = counts[f"earned/{spec.name}"] / num
      metrics[f"reward/functions/{spec.name}"] = mean
  return metrics
