"""The order of the rooms is a test: imports point down, config stays up."""

import ast
import pathlib

import pytest

PACKAGE = pathlib.Path(__file__).parents[1] / "dppo_jax"
LEVELS = [
  {"records", "keys", "buckets", "sharding"},
  {"algo", "models", "arithmetic", "sampling"},
  {
    "methods",
    "sources",
    "data",
    "decoding",
    "tokenizer",
    "rollout",
    "rewards",
    "update",
    "checkpoint",
    "metrics",
    "batch",
    "warmup",
  },
  {"config", "collect", "evaluate", "house", "report", "resume", "rooms"},
  {"train"},
  {"main"},
]
LEVEL = {name: level for level, names in enumerate(LEVELS) for name in names}
FILES = sorted(PACKAGE.rglob("*.py"))


def _room(path: pathlib.Path) -> str:
  return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def _imported(path: pathlib.Path) -> set[str]:
  """Rooms that a file imports, at whatever depth of the file."""
  found = set()
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.ImportFrom) and node.module:
      if node.module == "dppo_jax":
        found |= {alias.name for alias in node.names}
      elif node.module.startswith("dppo_jax."):
        found.add(node.module.split(".")[1])
    if isinstance(node, ast.Import):
      names = [alias.name for alias in node.names]
      found |= {n.split(".")[1] for n in names if n.startswith("dppo_jax.")}
  return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_imports_point_down(path):
  room = _room(path)
  if room == "__init__":
    assert not _imported(path)
    return
  for other in _imported(path) - {room}:
    assert LEVEL[other] <= LEVEL[room], f"{room} imports {other}"


def test_every_room_has_a_level():
  assert {_room(path) for path in FILES} - {"__init__"} == set(LEVEL)


def test_mathematics_knows_no_model_config_or_file():
  for path in (PACKAGE / "algo").glob("*.py"):
    assert _imported(path) <= {"algo", "records", "keys"}, path.name


def test_a_file_is_read_in_one_sitting():
  lengths = {path.name: len(path.read_text().splitlines()) for path in FILES}
  assert max(lengths.values()) <= 400, lengths
