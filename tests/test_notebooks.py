"""The notebooks match their sources, and run from top to bottom."""

import importlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from unittest import mock

import nbformat
import pytest

from tests.helpers import commands

FOLDER = commands.ROOT / "notebooks"
NAMES = sorted(path.stem for path in FOLDER.glob("[0-9]*.py"))

# What the tests shorten: the pages train until there is something to see. Few
# slots have fewer stages of decoding to compile.
SHORTER = {
  "01_one_step": [("num_slots = 96", "num_slots = 8")],
  "04_ablation": [
    ("num_slots = 128", "num_slots = 8"),
    ("steps=80", "steps=4"),
    ("sft.steps = 300", "sft.steps = 40"),
    ("eval.every = 8", "eval.every = 2"),
  ],
  "05_your_own": [
    ("num_slots = 128", "num_slots = 8"),
    ("sft.steps = 300", "sft.steps = 40"),
    ("c.steps = 30", "c.steps = 6"),
  ],
  "07_lora_tpu": [
    ("sft.steps = 1200", "sft.steps = 40"),
    ("c.steps = 60", "c.rollout.num_slots, c.steps = 8, 4"),
  ],
  "08_real_model": [
    ("c.steps = 40", "c.steps = 1"),
    ("c.eval.every = 10", "c.eval.every = 1"),
    (
      'c.log.writers = ""',
      'c.log.writers = ""\nc.data.eval_limit = c.data.prompts_per_step = 4\n'
      "c.rollout.max_tokens = c.rollout.num_slots = 8",
    ),
  ],
}
CACHE = importlib.import_module("experiments.15_real_model.fetch").CACHE

pytestmark = pytest.mark.slow


def _refresh():
  path = FOLDER / "refresh.py"
  spec = importlib.util.spec_from_file_location("refresh", path)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


@pytest.fixture(scope="module")
def refresh():
  return _refresh()


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_is_the_cells_of_its_source(name, refresh):
  saved = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
  nbformat.validate(saved)
  notebook = refresh.make(name)
  cells = lambda x: [(c.cell_type, c.source) for c in x.cells]
  hint = f"python notebooks/refresh.py {name}"
  assert cells(saved) == cells(notebook), hint
  assert saved.metadata == notebook.metadata, hint


@pytest.mark.parametrize(
  "package, has_gpu, requirement",
  [
    ("dppo_jax", False, "dppo_jax"),
    ("dppo_jax", True, "dppo_jax[cuda12]"),
    ("https://x/y.whl", True, "dppo_jax[cuda12] @ https://x/y.whl"),
  ],
)
def test_a_published_notebook_installs_the_package(
  package, has_gpu, requirement, refresh, monkeypatch
):
  monkeypatch.setattr(refresh, "PACKAGE", package)
  monkeypatch.setattr(refresh, "REPOSITORY", "owner/name")
  badge, install, *_ = refresh.make(NAMES[0]).cells
  assert f"owner/name/blob/main/notebooks/{NAMES[0]}.ipynb" in badge.source
  monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
  monkeypatch.setattr(shutil, "which", lambda name: has_gpu)
  shell = mock.Mock()
  exec(install.source, {"get_ipython": lambda: shell})
  shell.run_line_magic.assert_called_once_with(
    "pip", f"install -q '{requirement}'"
  )


@pytest.mark.parametrize("name", NAMES)
def test_a_saved_notebook_ran_in_order_and_shows_it(name):
  saved = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
  code = [cell for cell in saved.cells if cell.cell_type == "code"]
  text = (FOLDER / f"{name}.ipynb").read_text(encoding="utf-8")
  assert not re.search(r"/(root|home/\w+|Users/\w+)/", text)
  counts = [cell.execution_count for cell in code]
  assert counts == list(range(1, len(code) + 1))
  outputs = [output for cell in code for output in cell.outputs]
  assert {output.output_type for output in outputs} <= {
    "stream",
    "display_data",
    "execute_result",
  }
  assert any("image/png" in output.get("data", {}) for output in outputs)
  assert (FOLDER / f"{name}.ipynb").stat().st_size < 600_000


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_runs_from_top_to_bottom(name, tmp_path):
  if name == "08_real_model" and not (CACHE / "smollm2").exists():
    pytest.skip("python experiments/15_real_model/fetch.py smollm2 first")
  for path in (FOLDER / "refresh.py", FOLDER / f"{name}.py"):
    text = path.read_text()
    for long, short in SHORTER.get(path.stem, []):
      assert text.count(long) == 1, long
      text = text.replace(long, short)
    (tmp_path / path.name).write_text(text)
  done = subprocess.run(
    [sys.executable, str(tmp_path / "refresh.py")],
    env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(commands.ROOT)},
    capture_output=True,
    check=False,
    text=True,
  )
  assert done.returncode == 0, done.stderr[-3000:]
  assert (tmp_path / f"{name}.ipynb").exists()


@pytest.mark.parametrize("name", NAMES)
def test_files_that_a_notebook_links_to_exist(name):
  text = (FOLDER / f"{name}.py").read_text()
  for target in re.findall(r"^#.*\]\(([^)#\s]+)\)", text, re.MULTILINE):
    assert target.startswith("http") or (FOLDER / target).exists(), target


def test_the_page_lists_every_notebook():
  page = (FOLDER / "README.md").read_text()
  assert [name for name in NAMES if f"({name}.ipynb)" not in page] == []
