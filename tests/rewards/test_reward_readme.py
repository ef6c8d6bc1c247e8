"""Examples and the tables of equal answers of rewards/README.md hold."""

import csv
import pathlib
import re
import sys

import pytest

import dppo_jax
from dppo_jax.rewards import Grader

README = pathlib.Path(dppo_jax.__file__).parent / "rewards" / "README.md"
TEXT = README.read_text()
SHOWN = re.findall(r"(?m)^\| `(.+)` \| `(.+)` \| (equal|not)\b.*\|$", TEXT)
FILES = dict(re.findall(r"(?ms)^```text\n# (\w+\.py)\n(.*?)^```$", TEXT))
PATIENT = 60.0  # seconds: a slow machine is no reason to fail


def test_the_tables_of_what_counts_as_equal():
  file = pathlib.Path(__file__).with_name("equal_answers.csv")
  with file.open(encoding="utf-8", newline="") as lines:
    rows = [tuple(row)[:3] for row in csv.reader(lines)][1:]
  assert len(rows) > 50 and len(SHOWN) > 10 and {*SHOWN} <= {*rows}
  golds, answers, words = zip(*rows, strict=True)
  texts = [rf"It is \boxed{{{answer}}}." for answer in answers]
  with Grader("math", timeout_seconds=PATIENT) as grader:
    earned = grader.grade(golds, texts, golds).rewards
  documented = [word == "equal" for word in words]
  pairs = zip(rows, earned == documented, strict=True)
  assert [row for row, is_true in pairs if not is_true] == []


@pytest.fixture
def path(tmp_path, monkeypatch) -> pathlib.Path:
  monkeypatch.setattr(sys, "path", [*sys.path])
  for name, source in FILES.items():
    (tmp_path / name).write_text(source)
  return tmp_path


def test_pure_text(path):
  with Grader(f"{path}/brevity.py:brevity", 1, PATIENT) as grader:
    grader.self_check({})
    graded = grader.grade(
      ["?"] * 2, ["", "x" * 400], ["1"] * 2, group_sizes=[2]
    )
  assert graded.rewards.tolist() == [1.0, 0.5]
  assert not sum(graded.counts.values())


def test_a_column_of_the_data(path):
  texts, levels = [r"\boxed{1}", r"\boxed{2}", r"\boxed{1}"], ["4", "5", "3"]
  columns = {"level": levels, "subject": ["Algebra"] * 3}
  with Grader(f"exact:0.5,{path}/hard.py:hard", 1, PATIENT) as grader:
    grader.self_check(columns)
    with pytest.raises(ValueError, match="hard requires 'level', but"):
      grader.self_check({"subject": ["Algebra"]})
    graded = grader.grade(["?"] * 3, texts, ["1"] * 3, columns)
  assert graded.rewards.tolist() == [1.5, 0.0, 0.5]
  assert graded.counts["errors"] == 0


@pytest.mark.slow
def test_a_function_that_may_hang(path):
  write = "```python\n{}\n```".format
  texts = [
    *[write("print(6 * 7)"), "no program", write("print(43)"), write("1 / 0")],
    write("print(42, flush=True)\nwhile True: pass"),
  ]
  reference = f"{path}/unit_tests.py:unit_tests"
  with Grader(f"boxed:0,{reference}", 2, timeout_seconds=5.0) as grader:
    graded = grader.grade(["?"] * 5, texts, ["42"] * 5, group_sizes=[5])
    (line,) = grader.pop_warnings()
  assert graded.rewards.tolist() == [1.0, 0.0, 0.0, 0.0, 0.0]
  assert graded.counts["timeouts"] == 1
  assert "'unit_tests' gave no answer within 5 s" in line


def test_a_reward_model(path):
  """A score does not depend on other completions; padding saves compiling."""
  texts = [f"It is {x}." * (x % 9) for x in range(100)]
  functions = f"{path}/reward_model.py:RewardModel:0.5:batched"
  with Grader(f"boxed,{functions}") as grader:
    grader.self_check({})
    grade = lambda x: grader.grade(["?"] * len(x), x, ["1"] * len(x))
    graded, alone = grade(texts), [grade([x]).rewards[0] for x in texts[:9]]
  assert graded.rewards[:9].tolist() == alone and len({*alone}) == 9
  assert 0 < graded.rewards.min() < graded.rewards.max() < 0.5
  assert not sum(graded.counts[x] for x in ("errors", "nonfinite"))
  (name,) = (x for x in sys.modules if x.endswith("_reward_model_py"))
  assert sys.modules[name].score._cache_size() == 1
