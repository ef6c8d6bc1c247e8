"""Experiments run for hours: every name they import must exist."""

import ast
import importlib
import importlib.util
import json

import pytest

from experiments.common import results
from tests.helpers import commands

FILES = sorted(commands.ROOT.glob("experiments/**/*.py"))
FILES += sorted(commands.ROOT.glob("configs/*.py"))
FILES += sorted(commands.ROOT.glob("notebooks/*.py"))
PACKAGES = ("dppo_jax", "experiments")


def _imports(path, tree: ast.Module) -> dict[str, object]:
  """Returns imports of the package and of experiments, by the name used."""
  package = ".".join(path.relative_to(commands.ROOT).parts[:-1])
  values = {}
  for node in ast.walk(tree):
    if not isinstance(node, ast.ImportFrom):
      continue
    relative = "." * node.level + (node.module or "")
    place = importlib.util.resolve_name(relative, package)
    if place.partition(".")[0] not in PACKAGES:
      continue
    module = importlib.import_module(place)
    for alias in node.names:
      if not hasattr(module, alias.name):
        importlib.import_module(f"{place}.{alias.name}")
      values[alias.asname or alias.name] = getattr(module, alias.name)
  return values


@pytest.mark.parametrize(
  "path", FILES, ids=lambda path: f"{path.parent.name}/{path.stem}"
)
def test_names_that_an_experiment_imports_exist(path):
  tree = ast.parse(path.read_text())
  imported = _imports(path, tree)
  for node in ast.walk(tree):
    match node:
      case ast.Attribute(ast.Name(name), attribute) if name in imported:
        assert hasattr(imported[name], attribute), (
          f"{path.name}:{node.lineno}: {name}.{attribute}"
        )


def test_accelerator_results_are_kept_and_tabulated(tmp_path):
  """Items with rows are not measured again; a failure is a line."""
  run, table = (
    importlib.import_module(f"experiments.05_accelerator.{x}")
    for x in ("run", "table")
  )
  decode = {
    "name": "decode",
    "model": "m",
    "slots": 64,
    "context": 512,
    "seconds_of_a_step": 0.01,
    "tokens_per_second": 6400.0,
    "share_of_bandwidth": 0.5,
    "bytes_of_a_step": 2**30,
  }
  rows = [
    decode | {"item": "decode:m", "device": "1 x A", "jax": "1.2.3"},
    {
      "item": "step:m",
      "device": "1 x A",
      "name": "failed",
      "error": "RESOURCE_EXHAUSTED: 99 GiB",
    },
  ]
  results = tmp_path / "results.jsonl"
  results.write_text("".join(json.dumps(x) + "\n" for x in rows))
  assert run._done(results) == {"1 x A": {"decode:m", "step:m"}}
  table.write(results)
  page = (tmp_path / "table.md").read_text()
  assert "## 1 x A, jax 1.2.3" in page
  assert "| m | 64 | 512 | 10 | 6,400 | 50% |" in page
  assert "step:m failed: RESOURCE_EXHAUSTED: 99 GiB" in page


@pytest.mark.slow
@pytest.mark.parametrize(
  "module, make, page",
  [
    ("08_plan.step_seconds", lambda x: x.published_table(), "README.md"),
    ("08_plan.run", lambda x: x.agreement(), "table.csv"),
    (
      "17_papers_protocol.predict",
      lambda x: x.table(x.run.read()),
      "README.md",
    ),
  ],
)
def test_pages_show_what_the_code_predicts(module, make, page):
  """Predictions change with the package, unlike measurements."""
  module = importlib.import_module(f"experiments.{module}")
  table, path = make(module), module.HERE / page
  if path.suffix == ".csv":
    pytest.importorskip("tokamax")  # estimates are of the library in use
    table = results.to_csv(table)
  assert table.strip() in path.read_text(encoding="utf-8")
