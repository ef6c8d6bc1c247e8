"""Predictions of speed-ups from the unpruned runs alone.

Steps are proportional to `(1 + v f) ^ a`: `v` is the added variance as a
fraction of the batch's own, `f` the noise fraction of the gradient. At the
learning rate that is fastest for the noise, `a` is 1. Elsewhere, as AdamW
divides by a root mean square, noise `k` times as strong has the effect of a
learning rate divided by the root of `k`, and is `k` times as slow; where steps
are proportional to the rate to the power `-e`, that makes `a = 1 - e / 2`.
"""

import math

from . import controls, speedup, tasks, training


def all_of(pool: training.Pool, cells: list[str], seeds: int) -> list[dict]:
  """Predicts every variant of every cell, with the facts of the baseline."""
  predictions = []
  for cell in cells:
    facts = _facts(pool, cell, seeds)
    for variant in (*training.SWEEP, *training.CONTROLS_ONLY):
      seconds, added = _variant(facts, variant)
      factor = 1 + added * facts["noise_share"]
      steps = factor ** facts["exponent"]
      predictions.append(
        {
          "cell": cell,
          "variant": variant,
          "seconds": seconds,
          "added_variance": added,
          "faster": 1 / (seconds * steps),
          "faster_at_1": 1 / (seconds * factor),
          "fewer_steps": 1 / steps,
          **facts,
        }
      )
  return predictions


def _facts(pool: training.Pool, cell: str, seeds: int) -> dict[str, float]:
  """Returns means of the unpruned runs over seeds and steps."""
  every = lambda variant: [
    lines for seed in range(seeds) if (lines := pool.lines(cell, variant, seed))
  ]
  runs_of = every("grpo")
  steps = [
    line for lines in runs_of for line in lines if "step/seconds" in line
  ]
  # Results of versions that measured it by extra passes: those took time.
  timed = [line for line in steps if not line.get("noise/measured")]
  total = lambda name: sum(line[name] for line in timed)
  mean = lambda name, of=steps: sum(line[name] for line in of) / len(of)
  full = total("step/seconds")
  twice = [speedup.curve(lines) for lines in every("grpo, twice the rate")]
  once = [speedup.curve(lines) for lines in runs_of]
  gain = speedup.ratio(
    speedup.mean_curve(once), speedup.mean_curve(twice), axis=0
  )
  facts = {
    "update_share": total("update/seconds") / full,
    "rollout_share": (total("rollout/seconds") + total("reward/seconds"))
    / full,
    "micros": mean("update/micro_batches"),
    "noise_share": mean("noise/fraction"),
    "noise_scale": tasks.CELLS[cell].prompts
    * mean("noise/fraction")
    / max(1 - mean("noise/fraction"), 1e-3),
    "zero_variance": mean("groups/zero_std") / tasks.CELLS[cell].prompts,
    "rate_elasticity": math.log2(gain),
    "exponent": 1 - math.log2(gain) / 2,
  }
  needed = [line for line in steps if line.get("law/needed")]
  for share in controls.SHARES:
    for name in ("variance", "tokens"):
      facts[f"{name}_{share}"] = mean(f"law/{name}_{share}", needed)
  return facts


def _variant(facts: dict[str, float], variant: str) -> tuple[float, float]:
  """Predicts seconds of a step over the unpruned one's, and added variance."""
  share = float(variant.rpartition(" ")[2])
  # A last micro-batch is half empty, on average, and costs like the others.
  micros = facts["micros"]
  trains = lambda part: max(part * (micros - 0.5) + 0.5, 1.0) / micros
  update, rollout = facts["update_share"], facts["rollout_share"]
  if variant.startswith("prompts"):
    other = 1 - update - rollout
    return other + rollout * share + update * trains(share), 1 / share - 1
  if variant.startswith("by chance"):
    added = controls.DESIGN_EFFECT * (1 / share - 1)
    return 1 - update + update * trains(share), added
  tokens = facts[f"tokens_{share}"]
  return 1 - update + update * trains(tokens), facts[f"variance_{share}"]
