"""Completions to look at: which are written, and as a table."""

from collections.abc import Sequence
import re

import numpy as np

from dppo_jax.metrics import tables

PER_STEP = 4  # completions of each step in samples.jsonl


def of_step(
  samples: Sequence[dict],
  lengths: np.ndarray,
  advantages: np.ndarray,
  weights: np.ndarray,
  limit: int = PER_STEP,
) -> list[dict]:
  """Completions of one group side by side, with what became of each.

  The group is the first that has advantages and of which some were kept and
  others pruned; where there is none, the first that has advantages, and then
  the first of which some were pruned. Half of those that are shown were kept
  and half pruned, of different advantages, as far as there are as many.

  Args:
    samples: one for each completion that was sampled, group by group.
    lengths: `[Q, G]`, tokens; 0 for the completions of a pruned prompt.
    advantages, weights: `[Q, G]`; a completion of weight 0 was pruned.
  Returns:
    At most `limit` of the samples with `advantage`, `kept` and `weight`.
  """
  rows = np.flatnonzero(lengths.max(axis=1))
  size = lengths.shape[1]
  groups = [samples[i : i + size] for i in range(0, len(samples), size)]
  if len(groups) > len(rows):  # only those with variance were gathered
    groups = [x for x in groups if len({line["reward"] for line in x}) > 1]
  # Python's min takes the first of the best.
  places = range(min(len(groups), len(rows)))
  if not places:  # no group was gathered: nothing has an advantage
    none = {"advantage": 0.0, "kept": False, "weight": 0.0}
    return [line | none for line in samples[:limit]]

  def rank(place):
    is_kept = weights[rows[place]] > 0
    has_both = is_kept.any() and not is_kept.all()
    return not advantages[rows[place]].any(), not has_both

  place = min(places, key=rank)
  row = rows[place]
  is_kept = weights[row] > 0
  shown = half_and_half(is_kept, advantages[row], limit)
  return [
    groups[place][i]
    | {
      "advantage": float(advantages[row, i]),
      "kept": bool(is_kept[i]),
      "weight": float(weights[row, i]),
    }
    for i in shown
  ]


def half_and_half(
  is_kept: np.ndarray, advantages: np.ndarray, limit: int
) -> list[int]:
  """Places of at most `limit` items, half of them kept where that can be.

  Of those kept, and of those pruned, different advantages go before equal ones.
  """

  def in_order(places):
    before = lambda i: (
      (advantages[:i] == advantages[i]) & (is_kept[:i] == is_kept[i])
    )
    return sorted(places, key=lambda i: before(i).sum())

  kept = in_order(np.flatnonzero(is_kept))
  pruned = in_order(np.flatnonzero(~is_kept))
  kept = kept[: max(limit // 2, limit - len(pruned))]
  return sorted([*kept, *pruned[: limit - len(kept)]])


def table(lines: Sequence[dict]) -> str:
  """Groups of the first, a middle and the last step, as a Markdown table.

  Args:
    lines: of samples.jsonl; those that say what became of them are shown.
  """
  lines = [line for line in lines if "weight" in line]
  steps = sorted({line["step"] for line in lines})
  if not steps:
    return ""
  chosen = dict.fromkeys((steps[0], steps[len(steps) // 2], steps[-1]))
  rows = [
    (
      str(line["step"]),
      _code(line["problem"]),
      _code(line["completion"]),
      f"{line['reward']:g}",
      f"{line['advantage']:+.2f}",
      "kept" if line["kept"] else "pruned",
      f"{line['weight']:.2f}" if line["kept"] else "",
    )
    for step in chosen
    for line in lines
    if line["step"] == step
  ]
  head = ("step", "problem", "completion", "reward", "advantage", "", "weight")
  return tables.markdown(head, rows)


def _code(text: str, width: int = 70) -> str:
  """Text on one line as code; its middle is left out where it is long."""
  text = " ".join(text.split())
  if len(text) > width:  # a completion ends with its answer
    text = f"{text[: width // 2]} … {text[-width // 2 :]}"
  fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
  edge = " " if text.startswith("`") or text.endswith("`") or not text else ""
  return f"{fence}{edge}{text}{edge}{fence}"
