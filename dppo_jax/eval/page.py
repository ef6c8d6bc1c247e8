"""The results of an evaluation on a page: `results.md`, .json and .png."""

from collections.abc import Iterable, Mapping
import json
import pathlib
from typing import Any

from dppo_jax.analysis import jsonl, tables
from dppo_jax.eval import picture, published, scores

_EXPLAINED = """\
Each figure has its 95% confidence interval over problems behind it: where the
figure would be had other problems of the kind been asked.

- **greedy**: accuracy of the likeliest completion.
- **avg@n**: mean accuracy of n completions sampled of each problem.
- **maj@k**: accuracy of the answer that most of k completions give. Answers
  count as one where the grader says that they are equal; of tied ones each is
  taken with the same probability; a completion without an answer has no vote.
- **pass@k**: share of problems of which one of k completions is right.

maj@k and pass@k are exact means over all choices of k from the n completions,
so that k below n is estimated without bias."""


def write(directory: pathlib.Path, results: Mapping[str, Any]) -> pathlib.Path:
  """Writes the results to a directory; returns the page's path.

  Args:
    results: `title`, `weights` and `sampling` in words, `config`, `seconds`,
      and `sets`: by name what `scores.summarize` returns.
  """
  text = json.dumps(results, indent=2, ensure_ascii=False)
  jsonl.replace(directory / "results.json", [text, "\n"])
  picture.draw(directory / "results.png", results)
  path = directory / "results.md"
  jsonl.replace(path, ["\n\n".join(_page(results)), "\n"])
  return path


def lines(sets: Mapping[str, Any]) -> list[str]:
  """The main estimates as lines for a terminal of 80 columns."""
  width = min(max(len("set"), *map(len, sets)), 30)
  head = f"{'set':{width}}  problems  estimate   value   95% interval"
  found = [head]
  for name, of_set in sets.items():
    label, problems = tables.short(name, width), f"{of_set['problems']:,}"
    for estimate in scores.headlines(of_set["estimates"]):
      e = of_set["estimates"][estimate]
      found.append(
        f"{label:{width}}  {problems:>8}  {estimate:9} {e['value']:7.3f}"
        f"   {e['low']:.3f} to {e['high']:.3f}"
      )
      label = problems = ""
  return found


def _page(results: Mapping[str, Any]) -> Iterable[str]:
  sets = results["sets"]
  yield f"# Evaluation of {results['title']}"
  yield f"Weights: {results['weights']}. Samples: {results['sampling']}."
  yield _main_table(sets)
  yield "![estimates with their intervals](results.png)"
  yield _EXPLAINED
  if any(_sizes(x, "pass") for x in sets.values()):
    yield "## More samples"
    yield _sizes_table(sets)
  for name, of_set in sets.items():
    for column, groups in of_set["by"].items():
      yield f"## {name} by {column}"
      yield _group_table(column, groups)
  yield "## Completions"
  yield _completions_table(sets)
  yield (
    f"All of it took {results['seconds']:,.0f} s, compilation included; tokens "
    "a second are those of sampling and grading together. Every completion is "
    "in "
    "[completions.jsonl](completions.jsonl), every number in "
    "[results.json](results.json)."
  )
  yield from _published(results)


def _main_table(sets: Mapping[str, Any]) -> str:
  heads = list(
    dict.fromkeys(
      head for x in sets.values() for head in scores.headlines(x["estimates"])
    )
  )
  rows = [
    (name, f"{x['problems']:,}", *(_cell(x["estimates"], h) for h in heads))
    for name, x in sets.items()
  ]
  return tables.markdown(("set", "problems", *heads), rows)


def _sizes_table(sets: Mapping[str, Any]) -> str:
  rows = []
  sizes = sorted({k for x in sets.values() for k in _sizes(x, "pass")})
  for name, of_set in sets.items():
    for kind in ("pass", "maj"):
      if _sizes(of_set, kind):
        cells = (_cell(of_set["estimates"], f"{kind}@{k}") for k in sizes)
        rows.append((name, f"{kind}@k", *cells))
  return tables.markdown(("set", "", *(f"k = {k}" for k in sizes)), rows)


def _sizes(of_set: Mapping[str, Any], kind: str) -> list[int]:
  names = [x.partition("@") for x in of_set["estimates"]]
  return [int(k) for name, _, k in names if name == kind]


def _group_table(column: str, groups: Mapping[str, Any]) -> str:
  heads = list(next(iter(groups.values()))["estimates"])
  rows = [
    (group, f"{x['problems']:,}", *(_cell(x["estimates"], h) for h in heads))
    for group, x in groups.items()
  ]
  return tables.markdown((column, "problems", *heads), rows)


def _completions_table(sets: Mapping[str, Any]) -> str:
  rows = [
    (
      name,
      decoding,
      f"{x['completions']:,}",
      f"{x['tokens_mean']:,.1f}",
      f"{x['truncated']:.1%}",
      f"{x['unboxed']:.1%}",
      f"{x['seconds']:,.1f}",
      f"{x['tokens_per_second']:,.0f}",
    )
    for name, of_set in sets.items()
    for decoding, x in of_set["completions"].items()
  ]
  head = ("set", "decoding", "completions", "mean tokens")
  more = ("cut off", "without a box", "seconds", "tokens/s")
  return tables.markdown((*head, *more), rows)


def _published(results: Mapping[str, Any]) -> Iterable[str]:
  config = results["config"]
  path = config["model.path"] or config["model.hub_id"]
  figures = published.find(path, results["sets"])
  if not figures:
    return
  yield f"## What others publish of {figures[0].model}"
  yield (
    "Not ours: figures as their sources print them, under conditions of their "
    "own (prompts, graders, limits, how the checkpoint was chosen)."
  )
  yield tables.markdown(
    ("set", "their training", "their metric", "%", "source"),
    [
      (x.dataset, x.training, x.metric, f"{x.percent:g}", x.source)
      for x in figures
    ],
  )


def _cell(estimates: Mapping[str, Any], name: str) -> str:
  if name not in estimates:
    return ""
  e = estimates[name]
  return f"{e['value']:.3f} ({e['low']:.3f}..{e['high']:.3f})"
