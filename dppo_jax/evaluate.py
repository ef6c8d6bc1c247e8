"""Accuracy on held-out problems."""

from collections.abc import Callable, Iterator

import jax
import numpy as np

from dppo_jax import data, rewards
from dppo_jax.grading import grade
from dppo_jax.records import PromptBatch, Rollout
from dppo_jax.rng import StepRng


def evaluate(
  roll_out: Callable[[PromptBatch, StepRng], Rollout],
  problems: data.ProblemSet,
  tokenizer: data.Tokenizer,
  grader: rewards.Grader,
  rng: StepRng,
  num_prompts: int,
) -> tuple[dict[str, float], list[dict]]:
  """Share of right completions, its standard error, and the completions.

  Args:
    roll_out: samples completions of `num_prompts` prompts.
    rng: consumed; what a problem samples does not depend on `num_prompts`.
  Returns:
    `eval/accuracy`, `eval/stderr` over problems, `eval/tokens` per completion,
    `eval/stopped`, and a line of samples.jsonl for every completion.
  """
  correct, lengths, is_stopped, samples = [], [], [], []
  for prompts, num_real in _batches(problems, num_prompts):
    # Without the repetitions that fill up the last batch.
    rollout = jax.tree.map(
      lambda x, n=num_real: x[:n] if x.ndim else x,
      jax.device_get(roll_out(prompts, rng)),
    )
    graded = grade(rollout, problems, tokenizer, grader, verifier_only=True)
    correct.append(graded.correct)
    lengths.append(rollout.lengths)
    is_stopped.append(rollout.is_stopped)
    samples += graded.samples
  per_problem = np.concatenate(correct).mean(axis=1, dtype=np.float64)
  return {
    "eval/accuracy": per_problem.mean(),
    "eval/stderr": per_problem.std() / np.sqrt(per_problem.size),
    "eval/tokens": np.concatenate(lengths).mean(),
    "eval/stopped": np.concatenate(is_stopped).mean(),
  }, samples


def _batches(
  problems: data.ProblemSet, num_prompts: int
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
