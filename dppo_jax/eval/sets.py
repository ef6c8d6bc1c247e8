"""Completions of every problem of an evaluation set, graded."""

from collections.abc import Callable, Iterator, Sequence
import itertools
from typing import NamedTuple
import zlib

import jax
import numpy as np

from dppo_jax import data, rewards
from dppo_jax.eval import estimators
from dppo_jax.records import PromptBatch, Rollout
from dppo_jax.rng import Stage, StepRng, rng_at
from dppo_jax.run import distributed
from dppo_jax.step.grade import grade, with_texts


class Completions(NamedTuple):
  """Graded completions of `M` problems, `k` of each, in the data's order.

  Attributes:
    correct: `[M, k]`, what the verifier says of each, from 0 to 1.
    lengths: `[M, k]`, tokens.
    is_stopped: `[M, k]`, False where the token limit cut it off.
    samples: a line of samples.jsonl for each.
    slot_steps: how many tokens could have been decoded.
  """

  correct: np.ndarray
  lengths: np.ndarray
  is_stopped: np.ndarray
  samples: list[dict]
  slot_steps: int

  def metrics(self) -> dict[str, float]:
    """Scalars to log; pass@k as `pass_at_k` where there are several."""
    per_problem = self.correct.mean(axis=1, dtype=np.float64)
    num_samples = self.correct.shape[1]
    found = {
      "accuracy": per_problem.mean(),
      "stderr": per_problem.std() / np.sqrt(per_problem.size),
      "tokens": self.lengths.mean(),
      "stopped": self.is_stopped.mean(),
    }
    for size in estimators.sizes(num_samples)[1:]:
      best = estimators.best_of(self.correct, size)
      found[f"pass_at_{size}"] = best.mean()
    return found


def evaluate(
  roll_out: Callable[[PromptBatch, StepRng], Rollout],
  problems: data.ProblemSet,
  tokenizer: data.Tokenizer,
  grader: rewards.Grader,
  rng: StepRng,
  num_prompts: int,
) -> Completions:
  """Completions of every problem; the arguments are those of `batches`."""
  args = (roll_out, problems, tokenizer, grader, rng, num_prompts)
  return join(list(batches(*args)))


def batches(
  roll_out: Callable[[PromptBatch, StepRng], Rollout],
  problems: data.ProblemSet,
  tokenizer: data.Tokenizer,
  grader: rewards.Grader,
  rng: StepRng,
  num_prompts: int,
) -> Iterator[Completions]:
  """Completions of the problems, `num_prompts` of them at a time.

  Args:
    roll_out: samples completions of `num_prompts` prompts.
    rng: consumed; what a problem samples does not depend on `num_prompts`.
  """
  for rollout in _rollouts(roll_out, problems, rng, num_prompts):
    graded = grade(rollout, problems, tokenizer, grader, verifier_only=True)
    yield Completions(
      graded.correct,
      rollout.lengths,
      rollout.is_stopped,
      with_texts(graded.samples),
      int(rollout.slot_steps),
    )


def join(parts: Sequence[Completions]) -> Completions:
  """Consecutive parts as one."""
  *arrays, samples, slot_steps = zip(*parts, strict=True)
  samples = list(itertools.chain(*samples))
  return Completions(*map(np.concatenate, arrays), samples, sum(slot_steps))


def rng_of_set(root_key: jax.Array, name: str, number: int) -> StepRng:
  """The randomness of an evaluation set.

  That of any but the first comes from its name: it does not depend on which
  other sets there are.
  """
  step = zlib.crc32(name.encode()) >> 1 if number else 0
  return rng_at(root_key, step, Stage.EVALUATE)


def _rollouts(
  roll_out: Callable, problems: data.ProblemSet, rng: StepRng, num_prompts: int
) -> Iterator[Rollout]:
  """Rollouts of every problem, without repetitions; one decodes ahead."""
  waiting = []
  for prompts, num_real in _prompts(problems, num_prompts):
    waiting.append((roll_out(prompts, rng), num_real))
    if len(waiting) > 1:
      yield _first_rows(*waiting.pop(0))
  yield _first_rows(*waiting.pop(0))


def _first_rows(rollout: Rollout, num: int) -> Rollout:
  cut = lambda x: x[:num] if x.ndim else x
  return jax.tree.map(cut, distributed.to_host(rollout))


def _prompts(
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
