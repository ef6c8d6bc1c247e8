"""Imports point up the code map, without cycles."""

import ast
import graphlib
import pathlib
import subprocess
import sys

import pytest

import dppo_jax

PACKAGE = pathlib.Path(__file__).parents[1] / "dppo_jax"
LEVELS = [
  {"distributed", "errors", "files", "records", "rng", "sharding"},
  {"algo", "analysis", "data", "models", "rewards"},
  {"methods", "metrics", "rollout"},
  {"step"},
  {"config"},
  {"run"},
  {"eval", "planning"},
  {"evaluate", "train", "export", "plan", "sample", "check"},
  {"main"},
]
LEVEL = {name: level for level, names in enumerate(LEVELS) for name in names}
FILES = sorted(PACKAGE.rglob("*.py"))
MODULES = {
  ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path
  for path in FILES
}
MODULES = {name.removesuffix(".__init__"): p for name, p in MODULES.items()}


def _imported(path: pathlib.Path) -> set[str]:
  """Modules of the package that a file imports, in functions too."""
  names = set()
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.ImportFrom) and node.module:
      for alias in node.names:
        inner = f"{node.module}.{alias.name}"
        names.add(inner if inner in MODULES else node.module)
    if isinstance(node, ast.Import):
      names |= {alias.name for alias in node.names}
  return names & MODULES.keys()


def _part(module: str) -> str:
  return module.split(".")[1] if "." in module else ""


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_down(module):
  for other in _imported(MODULES[module]):
    if _part(other) != _part(module):
      assert _part(module), f"dppo_jax/__init__ imports {other}"
      down = LEVEL[_part(other)] <= LEVEL[_part(module)]
      assert down, f"{module} imports {other}"


def test_no_import_goes_in_a_circle():
  """Neither between files nor between folders, on one level or across."""
  files = {name: _imported(path) - {name} for name, path in MODULES.items()}
  folders = {}
  for name, others in files.items():
    here = folders.setdefault(_part(name), set())
    here |= {_part(other) for other in others} - {_part(name)}
  for graph in (files, folders):
    tuple(graphlib.TopologicalSorter(graph).static_order())


def test_every_part_has_a_level():
  assert {_part(name) for name in MODULES} - {""} == set(LEVEL)


def test_algo_imports_no_model_config_or_files():
  for path in (PACKAGE / "algo").glob("*.py"):
    parts = {_part(name) for name in _imported(path)}
    assert parts <= {"algo", "errors", "records", "rng"}, path.name


def test_below_the_runs_nothing_reads_a_config():
  """The levels forbid its import; here, an attribute of what is handed in."""
  names = {"config", "configs"}
  parts = {"algo", "methods", "models", "rollout", "step"}
  for path in (p for name, p in MODULES.items() if _part(name) in parts):
    for node in ast.walk(ast.parse(path.read_text())):
      is_read = isinstance(node, ast.Attribute) and node.attr in names
      is_of_jax = is_read and ast.unparse(node) == "jax.config"
      assert not is_read or is_of_jax, f"{path.name}:{node.lineno}"


def test_subpackages_are_imported_on_first_use():
  listed = {name for name in dir(dppo_jax) if not name.startswith("_")}
  assert listed >= {"algo", "methods", "records", "rewards", "rng", "rollout"}
  for name in listed:
    assert getattr(dppo_jax, name).__name__ == f"dppo_jax.{name}"
  with pytest.raises(AttributeError, match="has no attribute 'algos'"):
    _ = dppo_jax.algos


@pytest.mark.parametrize(
  "statement",
  [
    "import dppo_jax; dir(dppo_jax)",
    "from dppo_jax.analysis import compare",  # tables and pictures of runs
    "from dppo_jax import main",  # which sets variables that JAX reads
  ],
)
def test_start_without_jax(statement):
  code = f"import sys; {statement}; assert 'jax' not in sys.modules"
  subprocess.run([sys.executable, "-c", code], check=True)
