"""Experiments run for hours: what they take from the package must be there."""

import ast
import importlib
import json
import sys

import commands
import pytest

FILES = sorted(commands.ROOT.glob("experiments/**/*.py"))
FILES += sorted(commands.ROOT.glob("configs/*.py"))
FILES += sorted(commands.ROOT.glob("notebooks/*.py"))


def _imports(tree: ast.Module) -> dict[str, object]:
  """What a file imports of the package, by the name it uses."""
  found = {}
  for node in ast.walk(tree):
    if not isinstance(node, ast.ImportFrom):
      continue
    if not (node.module or "").startswith("dppo_jax"):
      continue
    module = importlib.import_module(node.module)
    for alias in node.names:
      name = f"{node.module}.{alias.name}"
      if not hasattr(module, alias.name):
        importlib.import_module(name)
      found[alias.asname or alias.name] = getattr(module, alias.name)
  return found


@pytest.mark.parametrize(
  "path", FILES, ids=lambda path: f"{path.parent.name}/{path.stem}"
)
def test_what_an_experiment_uses_of_the_package_exists(path):
  tree = ast.parse(path.read_text())
  imported = _imports(tree)
  for node in ast.walk(tree):
    match node:
      case ast.Attribute(ast.Name(name), attribute) if name in imported:
        assert hasattr(imported[name], attribute), (
          f"{path.name}:{node.lineno}: {name}.{attribute}"
        )


def test_what_an_accelerator_gave_is_kept_and_tabulated(tmp_path, monkeypatch):
  """Items with rows are not measured again; a failure is a line."""
  folder = commands.ROOT / "experiments" / "05_accelerator"
  monkeypatch.syspath_prepend(str(folder))
  for name in ("run", "table", "published"):
    monkeypatch.delitem(sys.modules, name, raising=False)
  run, table = (importlib.import_module(x) for x in ("run", "table"))
  decode = {
    "name": "decode",
    "model": "m",
    "slots": 64,
    "context": 512,
    "seconds_of_a_step": 0.01,
    "tokens_per_second": 6400.0,
    "share_of_bandwidth": 0.5,
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
  for name in ("run", "table", "published"):
    sys.modules.pop(name, None)
