"""Prompts to graded completions: what a step trains on, before any selection.

draw -> choose prompts -> roll out -> grade -> remember, once, or for a method
that refills as often as it takes to gather enough informative groups.
"""

import collections
from typing import NamedTuple

import jax
from jax import block_until_ready as ready
import numpy as np

from dppo_jax import data, keys, metrics, rewards
from dppo_jax.house import House
from dppo_jax.keys import Room
from dppo_jax.records import PromptBatch, Rollout, TrainState
from dppo_jax.rooms import Rooms


class Harvest(NamedTuple):
  """Graded completions of one step.

  Attributes:
    rewards: `[Q, G]`, 0 for the completions of a pruned prompt.
    num_prompts: by how many prompts a sum over them is to be divided.
    metrics: what is worth telling about them.
    samples: problems, completions, answers and rewards in words.
  """

  prompts: PromptBatch
  rollout: Rollout
  rewards: jax.Array | np.ndarray
  num_prompts: jax.Array | np.ndarray
  metrics: dict[str, float]
  samples: list[dict]


def harvest(
  house: House,
  compiled: Rooms,
  grader: rewards.Grader,
  state: TrainState,
  clock: metrics.Clock,
) -> tuple[TrainState, Harvest]:
  """Rolls out and grades the next prompts; the state remembers them."""
  num_prompts = house.config.data.prompts_per_step
  refill = house.method.refill
  counts, samples = collections.Counter(), []
  collected, limit = None, np.int32(num_prompts)
  first_draw = int(state.draws)
  with clock("rollout"):
    weights = ready(compiled.unstack(state.params))
  for i in range(refill.max_draws if refill else 1):
    index = first_draw + i
    at = lambda room, index=index: keys.draw_at(house.root_key, index, room)
    with clock("data"):
      prompts = data.draw(house.train, house.root_key, index, num_prompts)
      # A prompt rule counts steps, of which one may draw several times.
      draw = at(Room.PROMPTS)._replace(step=state.step)
      kept = compiled.choose(draw, state.history, prompts.ids, limit)
    with clock("rollout"):
      begun, decoding = compiled.roll_out(
        weights, prompts, at(Room.ROLLOUT), kept
      )
      # Most completions are whole by now: they are graded while the device
      # goes on with the others, within the rollout's seconds.
      rollout = compiled.finish(weights, decoding, prompts, kept)
      judged = judge(house, grader, begun, {})
      ready(rollout)
    with clock("reward"):
      graded = grade(house, grader, rollout, judged)
    counts.update(graded.counts)
    samples += graded.samples
    with clock("remember"):
      history, draws = compiled.remember(
        state.history, state.step, state.draws, rollout, graded.rewards
      )
      state = ready(state.replace(draws=draws, history=history))
    if not refill:
      gathered = (prompts, rollout, graded.rewards, np.float32(num_prompts))
      break
    with clock("refill"):
      collected, limit, denominator = ready(
        compiled.add(
          collected or compiled.begin(), prompts, rollout, graded.rewards
        )
      )
      gathered = (
        collected.prompts,
        collected.rollout,
        collected.rewards,
        denominator,
      )
      if int(collected.num_informative) == num_prompts:
        break
  return state, Harvest(*gathered, told(counts), samples)


class Graded(NamedTuple):
  """Rewards `[Q, G]` of a rollout, sums that describe it, and examples."""

  rewards: np.ndarray
  counts: collections.Counter
  samples: list[dict]


class Judged(NamedTuple):
  """A completion as text, and what the grader makes of it."""

  text: str
  outcome: str


def judge(
  house: House,
  grader: rewards.Grader,
  rollout: Rollout,
  known: dict[tuple[int, int], Judged],
) -> dict[tuple[int, int], Judged]:
  """What is `known`, and every other completion that is whole, by `[q, g]`."""
  tokens, lengths = np.asarray(rollout.tokens), np.asarray(rollout.lengths)
  is_whole = np.asarray(rollout.is_stopped) | (lengths == tokens.shape[2])
  places = [x for x in map(tuple, np.argwhere(is_whole)) if x not in known]
  texts = [house.tokenizer.decode(tokens[x][: lengths[x]]) for x in places]
  ids = np.asarray(rollout.prompt_ids)
  golds = [house.train.answers[ids[q]] for q, _ in places]
  outcomes = grader.judge(texts, golds)
  return known | dict(zip(places, map(Judged, texts, outcomes), strict=True))


def grade(
  house: House,
  grader: rewards.Grader,
  rollout: Rollout,
  known: dict[tuple[int, int], Judged] | None = None,
) -> Graded:
  """Rewards of every completion; 0 where the prompt was not rolled out.

  Args:
    known: what was judged before.
  """
  judged = judge(house, grader, rollout, known or {})
  lengths = np.asarray(rollout.lengths)
  keep = np.asarray(rollout.kept.keep)
  places = np.argwhere(lengths > 0)
  ids = np.asarray(rollout.prompt_ids)[places[:, 0]]
  found = [judged[tuple(place)] for place in places]
  golds = [house.train.answers[i] for i in ids]
  earned = np.array([grader.reward(x.outcome) for x in found], np.float32)
  out = np.zeros(lengths.shape, np.float32)
  out[tuple(places.T)] = earned
  is_flat = out.max(axis=1) == out.min(axis=1)
  counts = collections.Counter(x.outcome for x in found)
  counts.update(
    {
      "prompts": len(keep),
      "rolled_out": int(keep.sum()),
      "dead": int((is_flat & keep).sum()),
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
      sample(house.train.problems[i], x.text, gold, reward)
      for i, x, gold, reward in zip(
        ids, found, golds, out[tuple(places.T)], strict=True
      )
    ],
  )


def told(counts: collections.Counter) -> dict[str, float]:
  """The sums of a step's rollouts as metrics."""
  num = max(counts["completions"], 1)
  return {
    "prompts/drawn": counts["prompts"],
    "prompts/kept": counts["rolled_out"],
    "completions/drawn": counts["completions"],
    "completions/stopped": counts["stopped"] / num,
    "completions/dead_groups": counts["dead"],
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
    "problem": problem,
    "completion": completion,
    "answer": gold,
    "reward": float(reward),
  }
