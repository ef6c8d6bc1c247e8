"""What the data's README tells to write does what it says."""

import commands
import pages
from problems import DEFAULTS, read
import pytest
from sources import write_jsonl

from dppo_jax.config import options
from dppo_jax.data import prompts
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


def test_examples_are_of_at_most_twenty_lines_of_code():
  assert len(pages.files(PAGE)) == 3
  for text in pages.files(PAGE).values():
    lines = [x for x in text.splitlines() if x.strip()]
    assert len(lines) <= 20


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
  make = lambda name: prompts.template(f"my_prompts.py:{name}")
  row = {"context": None, "question": "1+2=", "problem": "1+2="}
  assert make("with_context")("", row) == "1+2="
  row["context"] = "Add."
  assert make("with_context")("", row) == "Add.\n1+2="
  talk = make("after_an_example")("", row)
  assert [m["role"] for m in talk] == ["user", "assistant", "user"]
  framed = {"problem": "Solve. Answer: $Answer.\n\n1\n\n2\n\nRemember."}
  assert make("without_frame")("", framed) == "1\n\n2"


def test_the_answer_in_the_last_box_is_found(written):
  solution = r"\boxed{1} or rather \boxed{\frac{1}{2}}"
  record = {"problem": "p", "solution": solution, "type": "x", "idx": 0}
  write_jsonl(written / "minerva_math.jsonl", [record])
  (found,) = read("my_math.py:minerva", DEFAULTS)
  assert found.answer == r"\frac{1}{2}"


def test_a_config_file_may_name_functions_themselves():
  c = commands.config("arithmetic")
  c.data.train = c.data.eval = lambda: iter(ROWS)
  c.data.template = lambda row: row["problem"] + row["problem"]
  c.data.prompts_per_step, c.sft.steps = 2, 0
  run = setup_run(c)
  assert run.train_set.lengths.tolist() == [8, 8]
  assert "'1+2=1+2='" in run.description()
  assert options.flatten(c)["data.train"].endswith("<lambda>")
