"""Accuracy on held-out problems."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from dppo_jax.data import ProblemSet, Tokenizer
from dppo_jax.records import PromptBatch, Rollout
from dppo_jax.rewards import Grader
from dppo_jax.rng import StepRng


class Answer(NamedTuple):
  """One completion of a held-out problem, as text, and 1 where it is right."""

  problem: str
  completion: str
  gold: str
  reward: float


def evaluate(
  roll_out: Callable[[PromptBatch, StepRng], Rollout],
  problems: ProblemSet,
  tokenizer: Tokenizer,
  grader: Grader,
  rng: StepRng,
  num_prompts: int,
) -> tuple[dict[str, float], list[Answer]]:
  """Share of right completions, its standard error, and the completions.

  Args:
    roll_out: samples completions of `num_prompts` prompts.
    rng: consumed; what a problem samples does not depend on `num_prompts`.
  Returns:
    `eval/accuracy`, `eval/stderr` over problems, `eval/tokens` per completion,
    `eval/stopped`, and every answer.
  """
  answers, lengths, is_stopped = [], [], []
  for prompts, num_real in _batches(problems, num_prompts):
    rollout = roll_out(prompts, rng)
    tokens, size, stopped = (
      np.asarray(x)[:num_real]
      for x in (rollout.tokens, rollout.lengths, rollout.is_stopped)
    )
    lengths.append(size)
    is_stopped.append(stopped)
    ids = np.repeat(np.asarray(prompts.ids)[:num_real], size.shape[1])
    texts = [
      tokenizer.decode(row[:n])
      for row, n in zip(
        tokens.reshape(ids.size, -1), size.reshape(-1), strict=True
      )
    ]
    golds = [problems.answers[i] for i in ids]
    for i, text, gold, outcome in zip(
      ids, texts, golds, grader.judge(texts, golds), strict=True
    ):
      is_right = float(outcome == "right")
      answers.append(Answer(problems.problems[i], text, gold, is_right))
  right = np.array([answer.reward for answer in answers])
  per_problem = right.reshape(len(problems.problems), -1).mean(axis=1)
  return {
    "eval/accuracy": per_problem.mean(),
    "eval/stderr": per_problem.std() / np.sqrt(per_problem.size),
    "eval/tokens": np.concatenate(lengths).mean(),
    "eval/stopped": np.concatenate(is_stopped).mean(),
  }, answers


def _batches(
  problems: ProblemSet, num_prompts: int
) -> Iterator[tuple[PromptBatch, int]]:
  """Every problem once, in order; the last batch repeats its last problem."""
  total = len(problems.problems)
  for start in range(0, total, num_prompts):
    ids = np.arange(start, start + num_prompts, dtype=np.int32)
    rows = np.minimum(ids, total - 1)
    yield (
      PromptBatch(
        ids=rows, tokens=problems.tokens[rows], lengths=problems.lengths[rows]
      ),
      min(num_prompts, total - start),
    )
