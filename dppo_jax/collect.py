"""Prompts to graded completions: what a step trains on, before any selection.

draw -> choose prompts -> roll out -> grade -> update history, once, or for a
method of dynamic sampling as often as it takes to gather enough groups whose
rewards differ.
"""

import collections
from typing import NamedTuple

import jax
import numpy as np

from dppo_jax import data, rewards
from dppo_jax.compiled import CompiledStep
from dppo_jax.records import PromptBatch, Rollout, TrainState
from dppo_jax.reporting import metrics
from dppo_jax.rng import Stage, rng_at
from dppo_jax.setup_run import Run


class Experience(NamedTuple):
  """Graded completions of one step.

  Attributes:
    rewards: `[Q, G]`, 0 for the completions of a pruned prompt.
    num_prompts: loss denominator, in prompts.
    metrics: scalars to log.
    samples: problems, completions, answers and rewards as text.
  """

  prompts: PromptBatch
  rollout: Rollout
  rewards: jax.Array | np.ndarray
  num_prompts: jax.Array | np.ndarray
  metrics: dict[str, float]
  samples: list[dict]


def collect(
  run: Run,
  step: CompiledStep,
  grader: rewards.Grader,
  state: TrainState,
  clock: metrics.Clock,
) -> tuple[TrainState, Experience]:
  """Rolls out and grades the next prompts; the state remembers them."""
  num_prompts = run.config.data.prompts_per_step
  dynamic = run.method.dynamic_sampling
  counts, samples = collections.Counter(), []
  buffer, limit = None, np.int32(num_prompts)
  first_draw = int(state.draws)
  with clock("rollout"):
    params = jax.block_until_ready(step.to_inference_params(state.params))
  for i in range(dynamic.max_draws if dynamic else 1):
    draw = first_draw + i
    rng_of = lambda stage, draw=draw: rng_at(run.root_key, draw, stage)
    with clock("data"):
      prompts = data.draw(run.train_set, run.root_key, draw, num_prompts)
      # A prompt rule counts steps, of which one may draw several times.
      rng = rng_of(Stage.PROMPTS)._replace(step=state.step)
      kept = step.choose_prompts(rng, state.history, prompts.ids, limit)
    with clock("rollout"):
      partial, decoding = step.begin_decode(
        params, prompts, rng_of(Stage.ROLLOUT), kept
      )
      # Most completions are whole by now: they are graded while the device
      # goes on with the others, within the rollout's seconds.
      rollout = step.finish_decode(params, decoding, prompts, kept)
      verdicts = verify(run, grader, partial, {})
      jax.block_until_ready(rollout)
    with clock("reward"):
      graded = grade(run, grader, rollout, verdicts)
    counts.update(graded.counts)
    samples += graded.samples
    with clock("update_history"):
      history, draws = step.update_history(
        state.history, state.step, state.draws, rollout, graded.rewards
      )
      state = jax.block_until_ready(state.replace(draws=draws, history=history))
    if not dynamic:
      gathered = (prompts, rollout, graded.rewards, np.float32(num_prompts))
      break
    with clock("dynamic_sampling"):
      buffer, limit, denominator = jax.block_until_ready(
        step.add_groups(
          buffer or step.init_buffer(), prompts, rollout, graded.rewards
        )
      )
      gathered = (buffer.prompts, buffer.rollout, buffer.rewards, denominator)
      if int(buffer.num_groups) == num_prompts:
        break
  return state, Experience(*gathered, rollout_metrics(counts), samples)


class Graded(NamedTuple):
  """Rewards `[Q, G]` of a rollout, sums that describe it, and examples."""

  rewards: np.ndarray
  counts: collections.Counter
  samples: list[dict]


class Verdict(NamedTuple):
  """A completion as text, and what the grader makes of it."""

  text: str
  outcome: str


def verify(
  run: Run,
  grader: rewards.Grader,
  rollout: Rollout,
  known: dict[tuple[int, int], Verdict],
) -> dict[tuple[int, int], Verdict]:
  """What is `known`, and every other completion that is whole, by `[q, g]`."""
  tokens, lengths = np.asarray(rollout.tokens), np.asarray(rollout.lengths)
  is_whole = np.asarray(rollout.is_stopped) | (lengths == tokens.shape[2])
  places = [x for x in map(tuple, np.argwhere(is_whole)) if x not in known]
  texts = [run.tokenizer.decode(tokens[x][: lengths[x]]) for x in places]
  ids = np.asarray(rollout.prompt_ids)
  golds = [run.train_set.answers[ids[q]] for q, _ in places]
  outcomes = grader.judge(texts, golds)
  return known | dict(zip(places, map(Verdict, texts, outcomes), strict=True))


def grade(
  run: Run,
  grader: rewards.Grader,
  rollout: Rollout,
  known: dict[tuple[int, int], Verdict] | None = None,
) -> Graded:
  """Rewards of every completion; 0 where the prompt was not rolled out.

  Args:
    known: what was verified before.
  """
  verdicts = verify(run, grader, rollout, known or {})
  lengths = np.asarray(rollout.lengths)
  keep = np.asarray(rollout.kept.keep)
  places = np.argwhere(lengths > 0)
  ids = np.asarray(rollout.prompt_ids)[places[:, 0]]
  found = [verdicts[tuple(place)] for place in places]
  golds = [run.train_set.answers[i] for i in ids]
  earned = np.array([grader.reward(x.outcome) for x in found], np.float32)
  out = np.zeros(lengths.shape, np.float32)
  out[tuple(places.T)] = earned
  is_zero_std = out.max(axis=1) == out.min(axis=1)
  counts = collections.Counter(x.outcome for x in found)
  counts.update(
    {
      "prompts": len(keep),
      "rolled_out": int(keep.sum()),
      "zero_std": int((is_zero_std & keep).sum()),
      "completions": len(places),
      "stopped": int(np.asarray(rollout.is_stopped).sum()),
      "tokens": int(lengths.sum()),
      "slot_steps": int(rollout.slot_steps),
      "earned": float(out.sum()),
    }
  )
  return Graded(
    rewards=out,
    counts=counts,
    samples=[
      sample(run.train_set.problems[i], x.text, gold, reward)
      for i, x, gold, reward in zip(
        ids, found, golds, out[tuple(places.T)], strict=True
      )
    ],
  )


def rollout_metrics(counts: collections.Counter) -> dict[str, float]:
  """The sums of a step's rollouts as metrics."""
  num = max(counts["completions"], 1)
  return {
    "prompts/drawn": counts["prompts"],
    "prompts/kept": counts["rolled_out"],
    "completions/drawn": counts["completions"],
    "completions/stopped": counts["stopped"] / num,
    "groups/zero_std": counts["zero_std"],
    "tokens/generated": counts["tokens"],
    "tokens/completion_mean": counts["tokens"] / num,
    "rollout/slot_utilisation": (
      counts["tokens"] / max(counts["slot_steps"], 1)
    ),
    "reward/mean": counts["earned"] / num,
    "reward/accuracy": counts["right"] / num,
    "reward/unboxed": counts["unboxed"] / num,
    "reward/unparsed": counts["unparsed"] / num,
    "reward/timeouts": counts["timeouts"],
    "reward/crashes": counts["crashes"],
  }


def sample(problem: str, completion: str, gold: str, reward: float) -> dict:
  """One line of samples.jsonl."""
  return {
    "split": "train",
    "problem": problem,
    "completion": completion,
    "answer": gold,
    "reward": float(reward),
  }
