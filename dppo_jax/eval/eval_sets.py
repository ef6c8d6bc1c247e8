"""Graded completions of every problem of an evaluation set."""

from collections.abc import Callable, Iterator
import itertools
from typing import NamedTuple
import zlib

import jax
from jaxtyping import Float
import numpy as np

from dppo_jax import distributed, rewards, sharding
from dppo_jax.analysis.statistics import Interval
from dppo_jax.errors import UserError
from dppo_jax.eval import estimators
from dppo_jax.models import parameters
from dppo_jax.records import Rollout
from dppo_jax.rewards.notation import normalize
from dppo_jax.rng import Stage, StepRng, rng_at
from dppo_jax.run.setup import Run
from dppo_jax.step import programs
from dppo_jax.step.grade import grade

# The answer in a box, by verifier: those that it takes to be other ones differ.
_READ: dict[str, Callable[[str], str]] = {"exact": str.strip, "math": normalize}
ACCURACY = ("accuracy", "accuracy_low", "accuracy_high")  # metrics
BATCH = 64  # problems in a batch; a training step with more sets it


class Completions(NamedTuple):
  """Graded completions of M problems, k of each, in the order of the data.

  Attributes:
    samples: a record of each completion, problem by problem: its text, id,
      index among the samples of the problem, grade, and `extracted`, the answer
      that the verifier read; None if there is none, or for verifiers other than
      `exact` and `math`.
    num: k.
  """

  samples: list[dict]
  num: int

  def of_problems(self, name: str) -> list[list]:
    """Returns an entry of all records, `[M, k]`."""
    values = [x[name] for x in self.samples]
    starts = range(0, len(values), self.num)
    return [values[i : i + self.num] for i in starts]

  @property
  def correct(self) -> Float[np.ndarray, "M k"]:
    """The verifier's verdicts, from 0 to 1."""
    return np.array(self.of_problems("correct"), np.float64)

  def estimates(self) -> dict[str, Interval]:
    """Returns avg@k, maj@k and pass@k with their intervals."""
    return estimators.estimates(self.correct, self.of_problems("extracted"))

  def accuracy(self) -> Interval:
    """Returns the mean over problems with its interval."""
    return estimators.interval(self.correct.mean(axis=1), self.num)

  def metrics(self) -> dict[str, float]:
    """Returns scalars to log; for k > 1 with `pass_at_2`, `pass_at_4`, ..."""
    correct = self.correct
    values = {
      **dict(zip(ACCURACY, self.accuracy(), strict=True)),
      "problems": len(correct),
      "tokens": np.mean([x["tokens"] for x in self.samples]),
      "stopped": np.mean([x["stopped"] for x in self.samples]),
    }
    for size in estimators.sizes(self.num)[1:]:
      values[f"pass_at_{size}"] = estimators.best_of(correct, size).mean()
    return values


def evaluate(
  run: Run,
  name: str,
  roll_out: Callable[..., Rollout],
  params: parameters.Params,
  grader: rewards.Grader,
  advance: Callable[[int], None] = lambda done: None,
) -> Completions:
  """Samples and grades completions of every problem of an evaluation set.

  Args:
    name: a key of run.eval_sets.
    roll_out: a compiled program of `program`.
    grader: its first function is the verifier.
    advance: called after each batch with the number of problems done.
  """
  problems = run.eval_sets[name]
  samples: list[dict] = []
  for rollout in rollouts(run, name, roll_out, params, run.spec.root_key):
    graded = grade(
      rollout,
      problems,
      run.tokenizer,
      grader,
      verifier_only=True,
      stop_strings=run.spec.stop_strings,
    )
    samples += [_record(x, grader.specs[0].reference) for x in graded.samples]
    size = rollout.lengths.shape[1]
    advance(len(samples) // size)
  return Completions(samples, size)


def program(run: Run, samples: int) -> programs.Program:
  """Returns the program that rolls out a batch of evaluation problems.

  Args:
    samples: completions of each problem; 0 decodes one greedily.
  """
  problems = next(iter(run.eval_sets.values()))  # all are of one width
  width = problems.tokens.shape[1]
  return programs.evaluation_program(run.spec, batch_size(run), width, samples)


def rng_of_set(root_key: jax.Array, name: str, number: int) -> StepRng:
  """Returns the randomness of the evaluation set with index `number`.

  The first set has the same randomness under any name. Every other set's
  depends on its name alone, so that adding a set changes none.
  """
  step = zlib.crc32(name.encode()) >> 1 if number else 0
  return rng_at(root_key, step, Stage.EVALUATE)


def prefix(number: int, name: str) -> str:
  """Returns the prefix of a set's metrics; the first set's has no name."""
  return f"eval/{name}" if number else "eval"


def check_metric(run: Run, metric: str) -> None:
  """Raises UserError unless the run evaluates `config.checkpoint.best`."""
  wrong = {"correct": 0.0, "tokens": 0, "stopped": False}
  num = max(run.eval_samples, 1)
  known = [
    f"{prefix(number, name)}/{x}"
    for number, name in enumerate(run.eval_sets)
    for x in Completions([wrong] * num, num).metrics()
  ]
  if metric and metric.removeprefix("-") not in known:
    raise UserError(
      f"config.checkpoint.best is {metric!r} but must be one of "
      f"{', '.join(known) or 'the metrics of config.data.eval, which is empty'}"
    )


def batch_size(run: Run) -> int:
  """Returns the problems of a batch, a multiple of the devices.

  At most `BATCH`, or the prompts of a training step, whose memory the plan has
  counted.
  """
  most = max(BATCH, run.spec.num_prompts)
  largest = max(map(len, run.eval_sets.values()), default=1)
  num_shards = sharding.num_shards(run.spec.mesh, "batch")
  return sharding.round_up(min(largest, most), num_shards)


def rollouts(
  run: Run,
  name: str,
  roll_out: Callable[..., Rollout],
  params: parameters.Params,
  root_key: jax.Array,
) -> Iterator[Rollout]:
  """Yields rollouts of every problem once, while the next one decodes.

  Takes the arguments of `evaluate`, and a key for the set's randomness.
  """
  problems, num_prompts = run.eval_sets[name], batch_size(run)
  rng = rng_of_set(root_key, name, [*run.eval_sets].index(name))

  def begin(start: int) -> Rollout:
    ids = np.arange(start, start + num_prompts, dtype=np.int32)
    ids = np.minimum(ids, len(problems) - 1)  # repeats the last problem
    prompts = problems.prompts_at(ids)
    return roll_out(params=params, prompts=prompts, rng=rng)

  starts = range(0, len(problems), num_prompts)
  started = itertools.pairwise(itertools.chain(map(begin, starts), [None]))
  for start, (rollout, _) in zip(starts, started, strict=True):
    num = len(problems) - start
    cut = lambda x, num=num: x[:num] if x.ndim else x
    yield jax.tree.map(cut, distributed.to_host(rollout))


def _record(sample: dict, verifier: str) -> dict:
  """Returns what an evaluation reports of a graded sample."""
  del sample["row"]
  box, read = rewards.last_boxed(sample["completion"]), _READ.get(verifier)
  extracted = read(box) if read and box is not None else None
  return {"sample": sample.pop("member"), "extracted": extracted} | sample
