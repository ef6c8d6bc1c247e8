"""A rollout as text, and what its completions earn."""

import collections
from collections.abc import Sequence
import functools
import itertools
import operator
from typing import NamedTuple

import numpy as np

from dppo_jax import data, rewards
from dppo_jax.records import Rollout
from dppo_jax.run import distributed


class GradedRollout(NamedTuple):
  """Graded completions; those of a pruned prompt earn 0.

  Attributes:
    rewards: f32 `[Q, G]`.
    correct: f32 `[Q, G]`, what the verifier says of each, from 0 to 1.
    counts: sums that describe them.
    samples: a line of samples.jsonl for each completion that was sampled. Of
      one that another process graded it has the numbers: see `with_texts`.
  """

  rewards: np.ndarray
  correct: np.ndarray
  counts: collections.Counter
  samples: list[dict]


def grade(
  rollout: Rollout,
  problems: data.ProblemSet,
  tokenizer: data.Tokenizer,
  grader: rewards.Grader,
  verifier_only: bool = False,
) -> GradedRollout:
  """Decodes and grades the completions of a rollout.

  Several processes divide the groups among them, and all learn what was earned.

  Args:
    problems: those that the rollout's prompt ids number.
    verifier_only: leaves out the functions that shape the reward.
  """
  owners = distributed.owners(rollout.lengths)
  # What nobody reads here stays on the devices: it is many bytes a token.
  rollout = rollout.replace(logprobs=None)
  rollout = distributed.to_host(rollout)
  shape = rollout.lengths.shape
  is_sampled = rollout.lengths.max(axis=1) > 0  # a group is sampled whole
  rows = np.flatnonzero(is_sampled & (owners == distributed.index()))
  with distributed.sharing_errors():
    texts, numbers, counts = _grade_rows(
      rollout, rows, problems, tokenizer, grader, verifier_only
    )
  numbers = {name: x.tolist() for name, x in numbers.items()}
  parts = distributed.gather({"numbers": numbers, "counts": counts})
  numbers = _joined([part["numbers"] for part in parts])
  rows = numbers["row"][:: shape[1]]

  def in_groups(name):
    out = np.zeros(shape, numbers[name].dtype)
    out[rows] = numbers[name].reshape(-1, shape[1])
    return out

  earned, correct = in_groups("reward"), in_groups("correct")
  is_zero_std = earned[rows].max(axis=1) == earned[rows].min(axis=1)
  counts = collections.Counter()
  for part in parts:
    counts.update(part["counts"])
  counts.update(
    {
      "prompts": shape[0],
      "rolled_out": len(rows),
      "zero_std": int(is_zero_std.sum()),
      "completions": len(numbers["row"]),
      "stopped": int(numbers["stopped"].sum()),
      "tokens": int(numbers["tokens"].sum()),
      "slot_steps": int(rollout.slot_steps),
      "earned": float(earned.sum()),
      # Of each group, summed; one of a single completion has none.
      "std": float(earned[rows].std(axis=1, ddof=int(shape[1] > 1)).sum()),
      "correct": float(correct.sum()),
    }
  )
  for name, values in numbers.items():
    if name.startswith("earned/"):
      counts[name] = float(values.sum())
  columns = [numbers[name].tolist() for name in ("tokens", "reward", "correct")]
  samples = [
    texts.get(place, {})
    | {"tokens": tokens, "reward": reward, "correct": is_correct}
    for place, tokens, reward, is_correct in zip(
      _places(rows, shape[1]), *columns, strict=True
    )
  ]
  return GradedRollout(earned, correct, counts, samples)


def _grade_rows(
  rollout: Rollout,
  rows: np.ndarray,
  problems: data.ProblemSet,
  tokenizer: data.Tokenizer,
  grader: rewards.Grader,
  verifier_only: bool,
) -> tuple[dict, dict[str, np.ndarray], collections.Counter]:
  """Grades the groups of some rows.

  Returns:
    The texts of each completion by row and place in the group; numbers, an
    array over completions each; and counts of why they earn what they do.
  """
  lengths, group_size = rollout.lengths[rows], rollout.lengths.shape[1]
  ids = np.repeat(rollout.prompt_ids[rows], group_size)
  completions = [
    tokenizer.decode(tokens[:length])
    for tokens, length in zip(
      rollout.tokens[rows].reshape(len(ids), rollout.tokens.shape[-1]),
      lengths.reshape(-1),
      strict=True,
    )
  ]
  prompts = [problems.problems[i] for i in ids]
  answers = [problems.answers[i] for i in ids]
  graded = grader.grade(
    prompts,
    completions,
    answers,
    problems.columns_at(ids),
    group_size=group_size,
    verifier_only=verifier_only,
  )
  texts = {
    place: {"problem": problem, "completion": completion, "answer": answer}
    for place, problem, completion, answer in zip(
      _places(rows, group_size), prompts, completions, answers, strict=True
    )
  }
  numbers = {
    "row": np.repeat(rows, group_size),
    "tokens": lengths.reshape(-1),
    "stopped": rollout.is_stopped[rows].reshape(-1),
    "reward": graded.rewards,
    "correct": graded.correct,
  }
  numbers |= {f"earned/{name}": x for name, x in graded.values.items()}
  return texts, numbers, graded.counts


def _places(rows: np.ndarray, group_size: int) -> list[tuple[int, int]]:
  """Row and number in the group of every completion of some groups."""
  return list(itertools.product(rows.tolist(), range(group_size)))


def _joined(parts: Sequence[dict[str, list]]) -> dict[str, np.ndarray]:
  """The numbers of all processes, sorted by row.

  Each row is of one of them, with its completions in order.
  """
  order = np.argsort([x for part in parts for x in part["row"]], kind="stable")
  joined = {}
  for name in parts[0]:
    values = [x for part in parts for x in part[name]]
    is_count = name in ("row", "tokens", "stopped")
    joined[name] = np.array(values, np.int32 if is_count else np.float32)[order]
  return joined


def with_texts(samples: Sequence[dict]) -> list[dict]:
  """The same lines with the texts that other processes have of them."""
  of_each = distributed.gather(list(samples))
  return [
    functools.reduce(operator.or_, lines)
    for lines in zip(*of_each, strict=True)
  ]


def to_metrics(
  counts: collections.Counter,
  samples: list[dict],
  functions: tuple[rewards.RewardSpec, ...],
) -> dict[str, float]:
  """Metrics of all rollouts of a step, from the sum of their counts.

  Args:
    samples: lines of samples.jsonl of every completion of the step.
  """
  num = max(counts["completions"], 1)
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
    "rollout/slot_utilisation": (
      counts["tokens"] / max(counts["slot_steps"], 1)
    ),
    "reward/mean": counts["earned"] / num,
    "reward/std": counts["std"] / max(counts["rolled_out"], 1),
    "reward/accuracy": counts["correct"] / num,
    "reward/unboxed": counts["unboxed"] / num,
    "reward/unparsed": counts["unparsed"] / num,
    "reward/timeouts": counts["timeouts"],
    "reward/crashes": counts["crashes"],
    "reward/errors": counts["errors"],
    "reward/nonfinite": counts["nonfinite"],
  }
  if len(functions) > 1:  # else reward/mean says it
    for spec in functions:
      mean = counts[f"earned/{spec.name}"] / num
      metrics[f"reward/functions/{spec.name}"] = mean
  return metrics
