r"""Parts of a speed-up, counted on the rollouts of one run.

  python -m experiments.17_papers_protocol.parts --workdir=runs/papers_protocol

Every step's completions are chosen and packed again in each way, one change at
a time, from padded sequences to our grpo and to dppo. Seconds are those of
micro-batches and of steps, fitted to the measured epochs with a KL penalty or
without, plus the measured other seconds, which are proportional to the
rollouts. It needs the logged completions of GRPO as published, and writes
parts.csv.
"""

import argparse
import math
import pathlib
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dppo_jax import algo, methods
from dppo_jax.analysis import tables
from dppo_jax.config import choose
from dppo_jax.files import jsonl
from dppo_jax.records import Groups
from dppo_jax.rng import Stage, rng_at
from dppo_jax.run.setup import setup_run

from ..common import results
from . import run

HERE = pathlib.Path(__file__).parent
OURS, BEST = "our grpo", "dppo 0.7"
RATE = 0.7
WINDOW = algo.PackingSpec(256, 2).window
PADDED, PACKED, SHARED = (
  "padded to the longest of the step",
  "packed densely",
  "prompts shared: GRPO as published",
)
NO_KL, NONZERO = "no KL", "zero advantages dropped: our grpo"
SMALLER = "groups of 4"
COMPLETIONS, PROMPTS = "completions pruned", "prompts pruned: dppo 0.7"


class Step(NamedTuple):
  """The rollouts of a step.

  Attributes:
    ids, prompts: `[Q]`, numbers of the problems, and tokens of their prompts.
    lengths, rewards: `[Q, G]`, tokens of completions, and their rewards.
  """

  ids: jax.Array
  prompts: jax.Array
  lengths: jax.Array
  rewards: jax.Array


def read_steps(workdir: pathlib.Path) -> list[Step]:
  """Returns the rollouts of a run, step by step."""
  problems = setup_run(choose.read(workdir / "config.json")).train_set
  number = {name: i for i, name in enumerate(problems.names)}
  steps: dict[int, dict[int, list[tuple[int, float]]]] = {}
  for path in sorted((workdir / "completions").glob("*.jsonl")):
    for x in jsonl.read(path):
      group = steps.setdefault(x["step"], {}).setdefault(number[x["id"]], [])
      group.append((x["tokens"], x["reward"]))
  lines = []
  for _, groups in sorted(steps.items()):
    ids, values = np.array([*groups]), np.array([*groups.values()])
    prompts, (tokens, rewards) = (
      problems.lengths[ids],
      values.transpose(2, 0, 1),
    )
    arrays = ids, prompts, tokens.astype(np.int32), rewards.astype(np.float32)
    lines.append(Step(*map(jnp.asarray, arrays)))
  return lines


class Counts:
  """Micro-batches of each way to train on the rollouts of a run.

  Args:
    row_length, rows_per_micro: the shape of a micro-batch.
  """

  def __init__(self, num_problems: int, row_length: int, rows_per_micro: int):
    self._shape = row_length, rows_per_micro
    self._rule = methods.drop_by_history(RATE)
    self._history = self._rule.init(num_problems)
    self._rows = jax.jit(self._count_rows, static_argnums=2)

  def _count_rows(self, prompts, lengths, shares):
    counts = algo.count_tokens(prompts, lengths, shares)
    row_length = self._shape[0]
    return algo.plan(counts, row_length, lengths.size, WINDOW).num_used

  def micros(self, step: Step, keep: jax.Array, shares: bool = True) -> int:
    """Returns the micro-batches of the completions that are kept."""
    rows = self._rows(step.prompts, jnp.where(keep, step.lengths, 0), shares)
    return math.ceil(int(rows) / self._shape[1])

  def step(self, number: int, step: Step) -> dict[str, float]:
    """Counts a step, and the fraction of its prompts that dppo rolls out."""
    rng = rng_at(jax.random.key(0), number)
    advantages = algo.group_normalized(step.rewards)
    everything = step.lengths > 0
    rule = methods.drop_small_advantage(RATE, "batch")
    chosen = self._rule.select(rng.at(Stage.PROMPTS), self._history, step.ids)
    prompts = chosen.keep
    rng = rng.at(Stage.COMPLETIONS)
    pruned = rule(rng, Groups(step.rewards, advantages, step.lengths)).keep
    kept = jnp.where(prompts[:, None], step.lengths, 0)
    both = rule(rng, Groups(step.rewards, advantages, kept)).keep
    self._history = self._rule.observe(
      self._history,
      number,
      jnp.where(prompts, step.ids, len(self._history)),
      *(step.rewards, step.rewards, step.lengths),
    )
    few = step.rewards[:, :4]
    padding = [(0, 0), (0, step.rewards.shape[1] - few.shape[1])]
    of_few = jnp.pad(algo.group_normalized(few), padding)
    longest = int(step.prompts.max() + step.lengths.max())
    micro = math.prod(self._shape)
    return {
      PADDED: step.lengths.size * longest / micro,
      PACKED: self.micros(step, everything, shares=False),
      SHARED: self.micros(step, everything),
      NO_KL: self.micros(step, everything),
      NONZERO: self.micros(step, advantages != 0),
      SMALLER: self.micros(step, of_few != 0),
      COMPLETIONS: self.micros(step, pruned),
      PROMPTS: self.micros(step, both & prompts[:, None]),
      "prompts": float(prompts.mean()),
      "few": float(step.lengths[:, :4].sum() / step.lengths.sum()),
    }


def costs(line: dict) -> tuple[float, float]:
  """Returns CPU seconds of a micro-batch, and the others of an epoch.

  Args:
    line: measurements of an epoch.
  """
  cpu = line["cpu_seconds"] / line["seconds"]
  update = cpu * (line["update"] + line["score"])
  return update / line["micro_batches"], line["cpu_seconds"] - update


def prices(lines: list[dict]) -> tuple[float, float]:
  """Returns CPU seconds of a micro-batch, and of a step's update without any.

  Args:
    lines: measurements of epochs.
  """
  amounts = [[x["micro_batches"], x["steps"]] for x in lines]
  spent = [costs(x)[0] * x["micro_batches"] for x in lines]
  micro, step = np.linalg.lstsq(np.array(amounts), np.array(spent))[0]
  return float(micro), float(step)


def table(workdir: pathlib.Path, lines: list[dict]) -> str:
  """Returns a line for each part and epoch."""
  task = run.TASKS["single"]
  size = task.steps(run.ROWS[run.PUBLISHED])
  steps = read_steps(workdir)
  config = choose.read(workdir / "config.json").pack
  counts = Counts(task.problems, config.row_length, config.rows_per_micro)
  counted = [counts.step(i, x) for i, x in enumerate(steps)]
  seed = run.longest(lines)
  measured = {
    (x["row"], x["epoch"]): x for x in lines if x["seed"] == seed and x["epoch"]
  }
  head = ["epoch", "part", "micro-batches", "CPU s", "over the line before"]
  head += ["over GRPO as published", "measured row: CPU s"]
  by_row = lambda *names: [
    x for (name, _), x in measured.items() if name in names
  ]
  with_kl, without_kl = (
    prices(by_row(run.PUBLISHED, BEST)),
    prices(by_row(OURS)),
  )
  page = []
  for epoch in range(1, 1 + len(steps) // size):
    base = measured[run.PUBLISHED, epoch]
    ours = measured.get((OURS, epoch))
    other = costs(base)[1]
    some = counted[(epoch - 1) * size : epoch * size]
    sums = {key: sum(x[key] for x in some) for key in some[0]}
    rolled_out = {PROMPTS: sums.pop("prompts"), SMALLER: sums.pop("few")}
    seconds = {}
    for key, num in sums.items():
      has_kl = key not in (NO_KL, NONZERO, SMALLER)
      micro, step = with_kl if has_kl else without_kl
      part = rolled_out.get(key, size) / size
      seconds[key] = num * micro + size * step + other * part
    rows = {SHARED: base, NONZERO: ours}
    rows[PROMPTS] = measured.get((BEST, epoch))
    before = seconds[PADDED]
    for part, spent in seconds.items():
      before = seconds[SHARED] if part == COMPLETIONS else before
      row = rows.get(part)
      page.append(
        [
          *(epoch, part, f"{sums[part]:.0f}", f"{spent:.0f}"),
          f"{before / spent:.2f}",
          f"{seconds[SHARED] / spent:.2f}",
          f"{row['cpu_seconds']:.0f}" if row else "-",
        ]
      )
      before = spent
  return tables.markdown(head, page)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("--workdir", type=pathlib.Path, required=True)
  args = parser.parse_args()
  root, lines = args.workdir.resolve(), run.read()
  workdir = run.workdir_of(root, run.PUBLISHED, run.longest(lines))
  page = table(workdir, lines)
  print(page)
  (HERE / "parts.csv").write_text(results.to_csv(page))


if __name__ == "__main__":
  main()
