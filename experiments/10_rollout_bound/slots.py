"""Decode slots, simulated: how long a rollout takes, what its tail costs."""

import numpy as np

from dppo_jax.rollout import decode

from . import bounds
from .bounds import Cells
from .logged import PER_PROMPT, Logged
from .moments import OBJECTIVES, live_tokens, moments

PROMPTS = 32  # of a step


def simulate(
  lengths: np.ndarray, num_slots: int, platform: str = "cpu"
) -> tuple[int, int]:
  """Decode steps, and slots times steps, as `rollout.sample` takes them.

  Args:
    lengths: `[N]`, tokens of the completions in the order in which they start.
  """
  num_slots = min(num_slots, len(lengths))
  return simulate_stages(lengths, decode.slot_schedule(num_slots, platform))


def simulate_stages(
  lengths: np.ndarray, schedule: list[int]
) -> tuple[int, int]:
  """Computes `simulate` for the slots of each stage."""
  waiting = list(lengths[::-1])
  left = np.array([waiting.pop() for _ in range(schedule[0])])
  steps = slot_steps = 0
  for size, limit in zip(schedule, [*schedule[1:], 0], strict=True):
    # Busy slots move together; at most `size` are.
    left = left[left > 0]
    while len(left) + len(waiting) > limit:
      # All steps until the next completion ends.
      turns = left.min()
      left = left - turns
      steps, slot_steps = steps + turns, slot_steps + turns * size
      left = left[left > 0]
      while waiting and len(left) < size:
        left = np.append(left, waiting.pop())
  return int(steps), int(slot_steps)


def batches(log: Logged) -> np.ndarray:
  """`[batches, N]`: lengths of `PROMPTS` prompts' groups, as they queue.

  The longest prompts start first.
  """
  group = log.lengths.shape[1]
  each = PER_PROMPT // group
  of_prompt = log.prompt_lengths[::each].reshape(-1, PROMPTS)
  order = np.argsort(-of_prompt, kind="stable")
  lengths = log.lengths.reshape(-1, PROMPTS, each, group)
  lengths = np.take_along_axis(lengths, order[:, :, None, None], axis=1)
  return lengths.swapaxes(1, 2).reshape(-1, PROMPTS * group)


def measure(log: Logged) -> list[dict]:
  """Measures batches of `PROMPTS` groups, with all slots or an eighth."""
  rows = []
  lengths = batches(log)
  for share, knowledge in ((1, "a slot each"), (8, "a slot for eight")):
    num_slots = lengths.shape[1] // share
    steps = np.mean([simulate(x, num_slots, "tpu")[0] for x in lengths])
    busy = lengths.sum() / len(lengths) / num_slots
    saved = 1 - busy / steps
    rows.append(
      {
        "rule": "no tail at all",
        "objective": "any",
        "knows": knowledge,
        "is": "bound",
        "decode_steps": steps,
        "without_tail": busy,
        "r=inf": 1 / (1 - log.shares.rollout * saved),
      }
    )
  for name, objective in OBJECTIVES.items():
    if objective.is_linear:
      gain = bounds.gains(_common_coin(log, objective))
      rows.append(
        {
          "rule": "all stop at one count, a slot each",
          "objective": name,
          "knows": "nothing",
          "is": "bound",
          **gain,
        }
      )
  return rows


def _common_coin(log: Logged, objective) -> Cells:
  """One random count for the whole step: no completion goes beyond it.

  What reaches `t` tokens has the weight `1 / P(count >= t)`. With a slot for
  each completion a step of decoding costs the same however many are alive, so
  seconds are saved only where all stop; and the tails' second moments are those
  of whole groups.
  """
  m = moments(log, objective)
  longest, of_batch = log.lengths.max(), batches(log).max(axis=1)
  count = np.arange(1, longest + 1)
  reached = (of_batch >= count[:, None]).mean(axis=1)
  live = live_tokens(log.rewards, log.lengths)
  trained = np.bincount(log.lengths.ravel(), live.ravel(), longest + 1)[1:]
  cost = log.shares.rollout * reached / reached.sum()
  cost += log.shares.update * trained / max(live.sum(), 1)
  tails = np.zeros(longest + 1)
  for t in count:
    factors = np.where(log.lengths >= t, m.factors, 0.0)
    tails[t - 1] = np.einsum("kg,kgh,kh->", factors, m.products, factors)
  value = (tails[:-1] - tails[1:]) / (len(log.lengths) * m.variance)
  return bounds.pool(Cells(cost, value, log.shares.rest))
