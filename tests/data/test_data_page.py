"""The examples of the data README do what it says."""

import contextlib
import io

import commands
import pages
import pytest
from sources import write_jsonl

from dppo_jax.config import options
from dppo_jax.data import sources
from dppo_jax.data.problems import make_prompt
from dppo_jax.run.setup import setup_run

ROWS = [
  {"problem": "1+2=", "answer": 3},
  {"problem": "3+4=", "answer": 7},
]
PAGE = commands.ROOT / "dppo_jax" / "data" / "README.md"


@pytest.fixture
def written(tmp_path, monkeypatch):
  """A directory in which the page's files are."""
  monkeypatch.chdir(tmp_path)
  for name, text in pages.files(PAGE).items():
    (tmp_path / name).write_text(text)
  return tmp_path


def test_own_data_are_ready_to_train_on(written):
  run = setup_run(
    commands.config(
      "arithmetic:dppo",
      data__train="my_sums.py:train",
      data__eval="my_sums.py:held_out",
    )
  )
  assert len(run.train_set) == 2400
  assert len(run.eval_sets["my_sums"]) == 100
  assert "0 also in train" in run.eval_sets["my_sums"].report
  for problem, answer in zip(
    run.train_set.problems, run.train_set.answers, strict=True
  ):
    assert eval(problem.removesuffix("=")) == int(answer)
  assert all(run.train_set.solutions)


def test_prompts_of_the_example(written):
  make = lambda name, row: make_prompt(f"my_prompts.py:{name}", "", row)
  row = {"context": None, "question": "1+2=", "problem": "1+2="}
  assert make("with_context", row) == "1+2="
  assert make("with_context", row | {"context": "Add."}) == "Add.\n1+2="
  messages = make("after_an_example", row)
  assert [m["role"] for m in messages] == ["user", "assistant", "user"]
  framed = {"problem": "Solve. Answer: $Answer.\n\n1\n\n2\n\nRemember."}
  assert make("without_frame", framed) == "1\n\n2"


def test_other_sources_of_the_examples(written):
  solution = r"\boxed{1} or rather \boxed{\frac{1}{2}}"
  record = {"problem": "p", "solution": solution, "type": "x", "idx": 0}
  write_jsonl(written / "minerva_math.jsonl", [record])
  (row,) = sources.read("my_math.py:minerva")
  assert row.answer == r"\frac{1}{2}"
  (written / "problems.csv").write_text('problem,answer\n"1,\n2",007\n')
  (row,) = sources.read("my_csv.py:rows")
  assert (row.problem, row.answer) == ("1,\n2", "007")


def test_the_example_in_python_prints_what_it_says():
  (text,) = (x for x in pages.blocks(PAGE, "python") if "print" in x)
  with contextlib.redirect_stdout(io.StringIO()) as output:
    exec(text, {})
  comments = [x.split("  # ")[1] for x in text.splitlines() if "print" in x]
  assert output.getvalue().splitlines() == comments


def test_a_config_file_may_name_functions_themselves():
  c = commands.config("arithmetic")
  c.data.train = c.data.eval = lambda: iter(ROWS)
  c.data.template = lambda row: row["problem"] + row["problem"]
  c.data.prompts_per_step, c.sft.steps = 2, 0
  run = setup_run(c)
  assert run.train_set.lengths.tolist() == [8, 8]
  assert "'1+2=1+2='" in run.description()
  assert options.flatten(c)["data.train"].endswith("<lambda>")
