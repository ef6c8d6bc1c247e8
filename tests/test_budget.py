"""The budget of the package: raising a limit needs a reason in the commit."""

import ast
import collections
import pathlib
import re

from dppo_jax import config

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = ROOT / "dppo_jax"
FILES = {x: x.read_text(encoding="utf-8") for x in PACKAGE.rglob("*.py")}


def _functions():
  for path, text in FILES.items():
    for node in ast.walk(ast.parse(text)):
      if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        name = f"{path.relative_to(PACKAGE)}:{node.name}"
        yield name, node.end_lineno - node.lineno + 1


def test_package_has_at_most_18520_lines():
  """Kernels for GPUs and the count of launches added 760 to 15,000.

  Drafts added 270, groups of several sizes and their automatic choice 270,
  LoRA 330, Gemma 3 300, sampling, optimizers, logs of completions and the
  best checkpoint 520, reward models 125, notations of answers, data columns
  and checks of checkpoints 180, grouped products and experts on GPUs 230, the
  decode kernel for TPUs 210.
  """
  assert sum(len(text.splitlines()) for text in FILES.values()) <= 18_520


def test_files_have_at_most_400_lines():
  lengths = {path: len(text.splitlines()) for path, text in FILES.items()}
  assert not {str(x): n for x, n in lengths.items() if n > 400}


def test_functions_have_at_most_80_lines():
  assert not {name: lines for name, lines in _functions() if lines > 80}


def test_training_loop_has_at_most_40_lines():
  assert dict(_functions())["train.py:_train"] <= 40


def test_there_are_at_most_65_options():
  """Four of LoRA, a user's optimizer, completions, the best checkpoint."""
  assert len(list(config.walk(config.Config()))) <= 65


def test_there_are_at_most_11_top_level_modules():
  """Five modes have a file each."""
  names = [x.stem for x in PACKAGE.glob("*.py") if x.stem != "__init__"]
  assert len(names) <= 11, names


def test_no_two_modules_share_a_name():
  names = collections.Counter(
    path.stem for path in FILES if path.stem != "__init__"
  )
  assert not [name for name, count in names.items() if count > 1]


def test_readme_code_map_names_every_module():
  """Each package on a line of its own, with its modules."""
  readme = (PACKAGE / "README.md").read_text(encoding="utf-8")
  code_map = re.search(r"```\n(dppo_jax/\n.*?)```", readme, re.S)[1]
  words = set(re.findall(r"\w+", code_map))
  modules = {path.stem for path in FILES if path.stem != "__init__"}
  assert not modules - words
