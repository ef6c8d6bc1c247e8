"""Examples of the data README."""

import contextlib
import io

import pytest

from dppo_jax.config import options
from dppo_jax.run.description import description
from dppo_jax.run.setup import setup_run
from tests.helpers import commands, pages

ROWS = [{"problem": "1+2=", "answer": 3}, {"problem": "3+4=", "answer": 7}]
PAGE = commands.ROOT / "dppo_jax" / "data" / "README.md"


@pytest.fixture
def written(tmp_path, monkeypatch):
  """Directory with the page's files."""
  monkeypatch.chdir(tmp_path)
  for name, text in pages.files(PAGE).items():
    (tmp_path / name).write_text(text)
  return tmp_path


def test_own_data_can_be_trained_on(written):
  c = commands.config("arithmetic", data__train="my_sums.py:train")
  c.data.eval = "my_sums.py:held_out"
  run = setup_run(c)
  assert len(run.train_set) == 2400 and all(run.train_set.solutions)
  assert len(run.eval_sets["held_out"]) == 100
  assert "0 also in train" in run.eval_sets["held_out"].report


def test_python_example_prints_its_comments():
  (text,) = (x for x in pages.blocks(PAGE, "python") if "print" in x)
  with contextlib.redirect_stdout(io.StringIO()) as output:
    exec(text, {})
  comments = [x.split("  # ")[1] for x in text.splitlines() if "print" in x]
  assert output.getvalue().splitlines() == comments


def test_config_file_may_name_functions_themselves():
  c = commands.config("arithmetic")
  c.data.train = c.data.eval = lambda: iter(ROWS)
  c.data.template = lambda row: row["problem"] + row["problem"]
  c.data.prompts_per_step, c.sft.steps = 2, 0
  run = setup_run(c)
  assert run.train_set.lengths.tolist() == [8, 8]
  assert "'1+2=1+2='" in description(run, c)
  assert options.flatten(c)["data.train"].endswith("<lambda>")
