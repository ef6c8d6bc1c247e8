"""Results of an evaluation as `results.json` and a Markdown page."""

from collections.abc import Callable, Mapping
import json
import pathlib
from typing import Any

from dppo_jax.analysis import tables
from dppo_jax.files import jsonl


def write(directory: pathlib.Path, results: Mapping[str, Any]) -> pathlib.Path:
  """Writes the results to a directory and returns the path of the page.

  Args:
    results: `title`, `weights` and `sampling` as text, `seconds`, and `sets`:
      for each name `problems`, `estimates` and `completions`.
  """
  path = directory / "results.md"
  jsonl.replace(path, [_page(results)])
  text = json.dumps(results, indent=2, ensure_ascii=False)
  jsonl.replace(directory / "results.json", [text, "\n"])
  return path


def table(
  sets: Mapping[str, Any], render: Callable[..., str] = tables.markdown
) -> str:
  """Returns all estimates of all sets as a table."""
  rows = []
  for name, results in sets.items():
    for estimate, x in results["estimates"].items():
      interval = f"{x['low']:.3f} to {x['high']:.3f}"
      label = estimate.replace("greedy", "greedy accuracy")
      label = label.replace("avg@", "sampled accuracy, avg@")
      cells = (f"{results['problems']:,}", label, f"{x['value']:.3f}")
      rows.append((name, *cells, interval))
  return render(("set", "problems", "estimate", "value", "95% interval"), rows)


def _page(results: Mapping[str, Any]) -> str:
  completions = "\n".join(
    f"- {name}, {decoding}: {x['completions']:,} completions of "
    f"{x['tokens']:.1f} tokens on average, {1 - x['stopped']:.1%} cut off, "
    f"{x['unboxed']:.1%} without a boxed answer, in {x['seconds']:,.1f} s"
    for name, of_set in results["sets"].items()
    for decoding, x in of_set["completions"].items()
  )
  return f"""\
# Evaluation of {results["title"]}

Weights: {results["weights"]}. Samples: {results["sampling"]}.

{table(results["sets"])}

Each value has its 95% confidence interval over problems. avg, maj and pass are
of n samples per problem; configs/README.md defines them.

## Completions

{completions}

The evaluation took {results["seconds"]:,.0f} s, compilation included. Every
completion is in [completions.jsonl](completions.jsonl).
"""
