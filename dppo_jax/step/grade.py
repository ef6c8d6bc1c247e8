"""Decoding and grading of a rollout."""

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
  """Graded completions; those of a pruned prompt have reward 0.

  Attributes:
    rewards: f32 `[Q, G]`.
    correct: f32 `[Q, G]`, verdict of the verifier, in [0, 1].
    counts: sums that describe them.
    samples: one line of samples.jsonl per sampled completion. A completion that
      another process graded has only its numbers: see `with_texts`.
  """

  rewards: np.ndarray
  correct: np.ndarray
  counts: collections.Counter
  samples: list[dict]


class _LocalGrades(NamedTuple):
  """Grades of some completions, in the order of their groups.

  Attributes:
    texts: problem, completion and answer, by row and place in the group.
    columns: lists of `row tokens stopped reward correct` and `earned/NAME` of
      each reward function, with one entry per completion.
    counts: reasons for the rewards, such as timeouts.
  """

  texts: dict[tuple[int, int], dict]
  columns: dict[str, list]
  counts: collections.Counter


def grade(
  rollout: Rollout,
  problems: data.ProblemSet,
  tokenizer: data.Tokenizer,
  grader: rewards.Grader,
  verifier_only: bool = False,
) -> GradedRollout:
  """Decodes and grades the completions of a rollout.

  The processes of a run divide the groups among them and share the grades.

  Args:
    problems: the set that the rollout's prompt ids index.
    verifier_only: leaves out the functions that shape the reward.
  """
  owners = distributed.owners(rollout.lengths)
  # Log-probabilities stay on the devices: nothing here reads them.
  rollout = distributed.to_host(rollout.replace(logprobs=None))
  is_sampled = rollout.lengths.max(axis=1) > 0  # groups are sampled as one
  rows = np.flatnonzero(is_sampled & (owners == distributed.index()))
  with distributed.sharing_errors():
    local = _grade_rows(
      rollout, rows, problems, tokenizer, grader, verifier_only
    )
  parts = distributed.gather({"columns": local.columns, "counts": local.counts})
  columns = _join([part["columns"] for part in parts])
  counts = collections.Counter()
  for part in parts:
    counts.update(part["counts"])
  return _summarise(rollout, columns, counts, local.texts)


def _grade_rows(
  rollout: Rollout,
  rows: np.ndarray,
  problems: data.ProblemSet,
  tokenizer: data.Tokenizer,
  grader: rewards.Grader,
  verifier_only: bool,
) -> _LocalGrades:
  """Grades the groups of some rows."""
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
  columns = {
    "row": np.repeat(rows, group_size),
    "tokens": lengths.reshape(-1),
    "stopped": rollout.is_stopped[rows].reshape(-1),
    "reward": graded.rewards,
    "correct": graded.correct,
    **{f"earned/{name}": x for name, x in graded.values.items()},
  }
  columns = {name: x.tolist() for name, x in columns.items()}
  return _LocalGrades(texts, columns, graded.counts)


def _join(parts: Sequence[dict[str, list]]) -> dict[str, np.ndarray]:
  """Joins the columns of all processes, sorted by row.

  Each row belongs to one process, with its completions in order.
  """
  order = np.argsort([x for part in parts for x in part["row"]], kind="stable")
  joined = {}
  for name in parts[0]:
    values = [x for part in parts for x in part[name]]
    is_count = name in ("row", "tokens", "stopped")
    joined[name] = np.array(values, np.int32 if is_count else np.float32)[order]
  return joined


def _summarise(
  rollout: Rollout,
  columns: dict[str, np.ndarray],
  counts: collections.Counter,
  texts: dict[tuple[int, int], dict],
) -> GradedRollout:
  """Arranges grades by group, and adds sums of them to `counts`."""
  shape = rollout.lengths.shape
  rows = columns["row"][:: shape[1]]

  def in_groups(name):
    out = np.zeros(shape, columns[name].dtype)
    out[rows] = columns[name].reshape(-1, shape[1])
    return out

  earned, correct = in_groups("reward"), in_groups("correct")
  is_zero_std = earned[rows].max(axis=1) == earned[rows].min(axis=1)
  counts.update(
    {
      "prompts": shape[0],
      "rolled_out": len(rows),
      "zero_std": int(is_zero_std.sum()),
      "completions": len(columns["row"]),
      "stopped": int(columns["stopped"].sum()),
      "tokens": int(columns["tokens"].sum()),
      "slot_steps": int(rollout.slot_steps),
      "earned": float(earned.sum()),
      # Summed over groups; a group of one has no standard deviation.
      "std": float(earned[rows].std(axis=1, ddof=int(shape[1] > 1)).sum()),
      "correct": float(correct.sum()),
    }
  )
  for name, values in columns.items():
    if name.startswith("earned/"):
      counts[name] = float(values.sum())
  numbers = [columns[name].tolist() for name in ("tokens", "reward", "correct")]
  samples = [
    texts.get(place, {})
    | {"tokens": tokens, "reward": reward, "correct": is_correct}
    for place, tokens, reward, is_correct in zip(
      _places(rows, shape[1]), *numbers, strict=True
    )
  ]
  return GradedRollout(earned, correct, counts, samples)


def _places(rows: np.ndarray, group_size: int) -> list[tuple[int, int]]:
  """Lists row and place in the group of every completion of some groups."""
  return list(itertools.product(rows.tolist(), range(group_size)))


def with_texts(samples: Sequence[dict]) -> list[dict]:
  """Adds the texts that other processes have of the samples."""
  gathered = distributed.gather(list(samples))
  return [
    functools.reduce(operator.or_, lines)
    for lines in zip(*gathered, strict=True)
  ]


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
