r"""Predicts the papers' table at their size from our groups and plan's seconds.

  python -m experiments.17_papers_protocol.predict

The rules of GRESO, CPPO and DPPO are replayed on the groups that GRPO as
published drew on the small model: fractions of prompts rolled out and of
completions trained on, by epoch. `--mode=plan` gives the seconds of a step of
Qwen3-4B on 8 H100 for these fractions. Epochs that were not measured repeat the
last one.
"""

from collections.abc import Sequence
import pathlib
from typing import NamedTuple

import jax
import numpy as np

from dppo_jax.analysis import tables
from dppo_jax.files import user_code
from dppo_jax.planning import assumed, memory, step_time, targets

from ..common import processes, results
from . import run

HERE = pathlib.Path(__file__).parent
PUBLISHED = {"GRPO": 1.0, "GRESO": 2.31, "CPPO": 1.35, "DPPO": 2.37}
CONFIG = f"{processes.ROOT / 'configs' / 'qwen_math.py'}:get_config"
NUM_DEVICES = 8
EPOCHS, PROMPTS, MAX_TOKENS = 15, 1024, 1024
PROMPT_TOKENS, TOKENS = 150, 600  # means, assumed
RATE, KEEP = 0.7, 0.5  # of DPPO and CPPO, assumed
GRESO_BASE, GRESO_FLOOR = 0.5, 0.01


class Fractions(NamedTuple):
  """Work of an epoch over that of GRPO as published.

  Attributes:
    prompts: rolled out.
    trained: fraction of the rolled-out completions that is trained on.
    groups: fraction of the groups of which some completion is.
  """

  prompts: float
  trained: float
  groups: float


def replay(lines: Sequence[dict]) -> dict[str, list[Fractions]]:
  """Returns each method's expected fractions in each epoch.

  Args:
    lines: measurements of the epochs of GRPO as published.
  """
  size = run.GROUP
  score: dict[int, float] = {}
  streak: dict[int, int] = {}
  table: dict[str, list[Fractions]] = {x: [] for x in PUBLISHED}
  for line in lines:
    ids = np.array([x for x, _ in line["groups"]])
    right = np.array([x for _, x in line["groups"]])
    advantages = _sizes(right, size)
    mixed = (right > 0) & (right < size)
    skip = np.array([streak.get(x, 0) for x in ids])
    kept = np.maximum(GRESO_BASE**skip, GRESO_FLOOR)
    table["GRESO"].append(_fractions(kept, np.outer(mixed, np.ones(size))))
    ones = np.ones(len(ids))
    table["GRPO"].append(_fractions(ones, np.ones((len(ids), size))))
    num = int(KEEP * size)
    table["CPPO"].append(Fractions(1.0, num / size, 1.0))
    last = np.array([score.get(x, np.inf) for x in ids])
    steps = np.array_split(np.arange(len(ids)), max(len(ids) // run.PROMPTS, 1))
    kept, trained = ones.copy(), np.ones((len(ids), size))
    for step in steps:
      known = last[step][np.isfinite(last[step])]
      mean = known.mean() if len(known) else 0.0
      kept[step] = np.where(last[step] < mean * (1 - 1e-5), 1 - RATE, 1.0)
      mean = np.average(advantages[step].mean(axis=1), weights=kept[step])
      is_low = advantages[step] < mean * (1 - 1e-5)
      trained[step] = np.where(is_low, 1 - RATE, 1.0)
    table["DPPO"].append(_fractions(kept, trained))
    for problem, zero, value in zip(
      ids, ~mixed, advantages.mean(axis=1), strict=True
    ):
      streak[problem] = streak.get(problem, 0) + 1 if zero else 0
      score[problem] = float(value)
  return table


def _sizes(right: np.ndarray, size: int) -> np.ndarray:
  """Returns |advantage| of each completion, those that are right first."""
  rate = (right / size)[:, None]
  is_right = np.arange(size) < right[:, None]
  deviation = np.sqrt(rate * (1 - rate) * size / (size - 1))
  return np.abs(is_right - rate) / np.where(deviation > 0, deviation, 1.0)


def _fractions(kept: np.ndarray, trained: np.ndarray) -> Fractions:
  """Returns the fractions of probabilities of prompts and completions."""
  some = 1 - np.prod(1 - trained, axis=1)
  of_kept = (np.average(x, weights=kept) for x in (trained.mean(axis=1), some))
  return Fractions(float(kept.mean()), *map(float, of_kept))


def stage_seconds(fractions: Fractions) -> dict[str, float]:
  """Returns plan's seconds of the stages of a step with these fractions."""
  config = user_code.load(CONFIG)("grpo")
  config.objective.args["beta"] = float(run.BETA)
  config.model.hub_id = "Qwen/Qwen3-4B"
  config.rollout.group_size = run.GROUP
  config.rollout.max_tokens = MAX_TOKENS
  prompts = round(PROMPTS * fractions.prompts / NUM_DEVICES) * NUM_DEVICES
  config.data.prompts_per_step = max(prompts, NUM_DEVICES)
  place = targets.parse(f"h100:{NUM_DEVICES}")
  mesh = assumed.abstract_mesh(config.mesh, place.num)
  planned = assumed.assumed_run(config, mesh, place.platform)
  planned = memory.choose_slots(planned, place.memory)
  held = memory.estimate(planned)
  changes = f"prompt={PROMPT_TOKENS},completion={TOKENS}"
  changes += f",trained={fractions.trained:.4f},groups={fractions.groups:.4f}"
  basis = step_time.assume(planned, place, changes)
  return step_time.estimate(planned, held, basis)


def step_seconds(seconds: dict[str, float], score: bool) -> float:
  """Returns the seconds of all stages.

  Args:
    score: adds a forward pass for the old log-probabilities.
  """
  # The update has five passes with a KL penalty.
  return sum(seconds.values()) + score * seconds["update"] / 5


def table(lines: Sequence[dict]) -> str:
  """Returns predicted and published speed-ups."""
  seed = run.longest(lines)
  some = [x for x in lines if (x["row"], x["seed"]) == (run.PUBLISHED, seed)]
  epochs = replay(sorted(some, key=lambda x: x["epoch"])[1:])
  head = ["method", "prompts rolled out, by measured epoch"]
  head += ["of their completions trained on", "speed-up, measured epochs"]
  head += [f"{EPOCHS} epochs", "and a scoring pass", "published"]
  different = {x for values in epochs.values() for x in values}
  seconds = {x: stage_seconds(x) for x in different}
  spent = {
    score: {
      name: [step_seconds(seconds[x], score) for x in values]
      for name, values in epochs.items()
    }
    for score in (False, True)
  }
  page = []
  for name, values in epochs.items():
    speeds = []
    for score, number in (
      (False, len(values)),
      (False, EPOCHS),
      (True, EPOCHS),
    ):
      base, mine = (
        sum(extended(spent[score][x], number)) for x in ("GRPO", name)
      )
      speeds.append(f"{base / mine:.2f}")
    columns = [*zip(*values, strict=True)][:2]
    fractions = (", ".join(f"{x:.2f}" for x in column) for column in columns)
    page.append([name, *fractions, *speeds, f"{PUBLISHED[name]:.2f}"])
  return tables.markdown(head, page)


def extended(values: Sequence[float], number: int) -> list[float]:
  """Returns `number` values; the last one is repeated."""
  return [values[min(i, len(values) - 1)] for i in range(number)]


def main() -> None:
  jax.config.update("jax_platforms", "cpu")
  page = table(run.read())
  print(page)
  (HERE / "predictions.csv").write_text(results.to_csv(page))


if __name__ == "__main__":
  main()
