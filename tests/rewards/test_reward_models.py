"""Rewards that load once, rewards of a whole batch, and rewards that hang."""

import os
import pathlib
import re
import sys

import jax
import numpy as np
import pytest

from dppo_jax.errors import UserError
from dppo_jax.rewards import Grader, check, pool
from dppo_jax.rewards import grader as graders

PATIENT = 60.0  # seconds: a slow machine is no reason to fail

MODELS = """
import os, pathlib, time
import jax
from dppo_jax.rewards import Verdict

LOG = pathlib.Path(__file__).with_name("log")

def log(*words):
  with LOG.open("a") as file:
    print(*words, file=file)

def pure(prompts, completions, level, **kwargs):
  return [None if "none" in c else float(len(p) - len(c) + x)
          for p, c, x in zip(prompts, completions, level)]

def verdict(completions, answers):
  return [Verdict("right" if c == a else "unparsed")
          for c, a in zip(completions, answers)]

class Slow:
  def __init__(self):
    time.sleep(3)
    log("loaded", os.getpid())

  def __call__(self, completions):
    if "hang" in completions:
      time.sleep(1000)
    return [2.0] * len(completions)

class Model:
  def __init__(self):
    log("loaded", os.getpid())
    self.weight = jax.device_put(2.0, jax.devices()[0])

  def __call__(self, completions):
    log("called", len(completions))
    lengths = jax.numpy.array([len(x) for x in completions])
    return jax.jit(lambda w, x: w * x)(self.weight, lengths)

class NeedsArguments:
  def __init__(self, path):
    pass

class NotCallable:
  pass

nothing = None

def factory():
  return Model()

def perform(completions):
  def stop():
    raise ValueError("stop")
  actions = {"raise": stop, "exit": exit, "short": lambda: [1.0],
             "scalar": lambda: 1.0, "array": lambda: jax.numpy.ones(()),
             "none": lambda: None, "words": lambda: ["one", "two"],
             "nan": lambda: [float("nan"), 2.0]}
  return actions[completions[0]]()
"""


@pytest.fixture
def path(tmp_path, monkeypatch) -> pathlib.Path:
  monkeypatch.setattr(sys, "path", [*sys.path])
  (tmp_path / "models.py").write_text(MODELS)
  return tmp_path / "models.py"


def log(path) -> list[list[str]]:
  return [x.split() for x in path.with_name("log").read_text().splitlines()]


def grade(grader, completions, **options):
  num = len(completions)
  return grader.grade(["?"] * num, completions, ["1"] * num, **options)


def test_batched_equals_alone_and_in_groups(path):
  """Pure functions, with weights, None and the outcomes of a verifier."""
  texts = ["1", "none", "", "12345", "1", "1"]
  inputs = [str(x) * x for x in range(6)], texts, ["1"] * 6
  results = []
  for batched, sizes in (("", None), ("", [2, 3, 1]), (":batched", [2, 3, 1])):
    functions = f"{path}:verdict{batched},{path}:pure:0.5{batched},boxed"
    with Grader(functions, 2, PATIENT) as grader:
      assert len(grader._workers) == (0 if batched else 2)
      grader.self_check({"level"})
      columns = {"level": [3, 1, 4, 1, 5, 9]}
      results.append(grader.grade(*inputs, columns, group_sizes=sizes))
      none = grader.grade([], [], [], {"level": []}, group_sizes=[])
      assert none.rewards.shape == (0,) and grader.pop_warnings() == []
  alone = results[0]
  assert alone.counts["right"] == 3 and alone.rewards[0] == 1 + (0 - 1 + 3) / 2
  for other in results[1:]:
    np.testing.assert_array_equal(other.rewards, alone.rewards)
    np.testing.assert_array_equal(other.correct, alone.correct)
    assert +other.counts == +alone.counts


def test_a_batched_model_loads_once_and_is_called_once_outside_the_mesh(path):
  """A value on one device would not fit a program of the mesh's eight."""
  functions = f"boxed,{path}:Model:0.5:batched"
  mesh = jax.make_mesh((8,), ("data",))
  check(functions)
  with jax.set_mesh(mesh), Grader(functions, 1, PATIENT) as grader:
    grader.self_check({})
    for _ in range(2):
      graded = grade(grader, ["", "1", "22", "333"], group_sizes=[2, 2])
      assert graded.rewards.tolist() == [0, 1, 2, 3]
    verdict = grade(grader, ["1"], verifier_only=True)
  assert [*verdict.values] == ["boxed"]
  assert log(path) == [["loaded", str(os.getpid())], *[["called", "4"]] * 2]


@pytest.mark.slow
def test_loading_does_not_count_against_the_deadline(path):
  """Neither at the start nor after a hang; each process loads once."""
  with Grader(f"{path}:Slow", 1, timeout_seconds=2.0) as grader:
    graded = grade(grader, ["1", "2"], group_sizes=[2])
    assert not sum(graded.counts.values())
    assert grade(grader, ["1"]).rewards == [2]
    assert len(log(path)) == 1
    graded = grade(grader, ["hang", "1"])
  assert graded.rewards.tolist() == [0, 2] and graded.counts["timeouts"] == 1
  assert len({pid for _, pid in log(path)}) == len(log(path)) == 2


@pytest.mark.parametrize("batched", ["", ":batched"])
@pytest.mark.parametrize(
  "name, message",
  [
    ("NeedsArguments", r"models.py:NeedsArguments\(\) .* argument: 'path'"),
    ("NotCallable", "models.py:NotCallable: the class has no method __call__"),
    ("factory", "models.py:factory does not take an argument 'completions'"),
    ("nothing", "there is no function 'nothing' in .*models.py: it is None"),
    ("missing", "there is no function 'missing' in .*models.py$"),
  ],
)
def test_bad_classes_and_objects_end_the_start(path, name, message, batched):
  with pytest.raises(UserError, match=message) as error:
    check(f"boxed,{path}:{name}{batched}")
  text = str(error.value)
  assert text.startswith("config.reward.functions: ") and "\n" not in text


def test_a_batched_function_names_the_column_that_it_requires(path):
  with Grader(f"{path}:pure:batched") as grader:
    with pytest.raises(UserError, match="pure requires 'level', but"):
      grader.self_check({"solution"})


@pytest.mark.parametrize(
  "action, message",
  [
    ("raise", r"raised ValueError: stop \(/.*models.py, line 54\)"),
    ("exit", "raised SystemExit: None"),
    ("short", "raised ValueError: returned 1 values for 2 completions"),
    ("scalar", "raised TypeError: returned 1.0, not a list of numbers"),
    ("array", r"raised TypeError: returned Array\(1., .*, not a list of numb"),
    ("none", "raised TypeError: returned None, not a list of numbers"),
    ("words", "raised ValueError: could not convert string to float: 'one'"),
    ("nan", "returned nan on a completion"),
  ],
)
def test_a_batched_fault_costs_the_call(path, action, message):
  functions, texts = f"boxed,{path}:perform:batched", [action, r"\boxed{1}"]
  with Grader(functions) as grader:
    graded = grade(grader, texts, group_sizes=[2])
    (warning,) = grader.pop_warnings()
  is_nan = action == "nan"
  assert graded.rewards.tolist() == [0, 3 if is_nan else 1]
  assert graded.counts["errors"] == (0 if is_nan else 2)
  assert graded.counts["nonfinite"] == (1 if is_nan else 0)
  line, *details = warning.splitlines()
  assert re.search(message, line)
  cost = "it earns" if is_nan else "they earn"
  assert f"; {cost} 0, counted as reward/" in line
  assert is_nan or details[0].startswith("Traceback")


@pytest.fixture
def hanging(monkeypatch):
  """A grader whose workers miss the deadline of calls with certain texts."""
  grader, texts, calls = Grader("a:f,math", num_workers=2), set(), []

  def call(self, reference, batch):
    calls.append(batch["completions"])
    if texts & {*batch["completions"]}:
      raise pool.Fault("timeouts", "gave no answer within 5 s")
    return [1.0] * len(batch["completions"])

  monkeypatch.setattr(pool.Worker, "call", call)
  grader.hanging_texts, grader.calls = texts, calls
  with grader:
    yield grader


def test_a_function_that_always_hangs_is_switched_off(hanging):
  """At most 20 deadlines, and one for calls already begun by each worker."""
  texts = [f"{x}" for x in range(64)]
  hanging.hanging_texts.update(texts)
  limit = graders.MAX_HANGS
  for step in range(3):
    hanging.calls.clear()
    graded = grade(hanging, texts, group_sizes=[8] * 8, verifier_only=True)
    deadlines = len(hanging.calls)
    assert deadlines <= (1 if step else limit) + 1
    assert not graded.rewards.any()
    lost = graded.counts["timeouts"] + graded.counts["switched_off"]
    assert lost == len(texts) and graded.counts["switched_off"] > 40
    lines = hanging.pop_warnings()
    assert len(lines) == (0 if step else 2) and "\n" not in "".join(lines)
  hanging.hanging_texts.clear()
  graded = grade(hanging, texts, group_sizes=[8] * 8, verifier_only=True)
  assert graded.rewards.all() and not sum(graded.counts.values())


def test_a_function_that_hangs_on_some_inputs_loses_only_those(hanging):
  """Also if all completions of every second prompt hang; `math` always may."""
  texts = [f"{x}" for x in range(80)]
  hanging.hanging_texts.update(texts[::3], *[texts[i : i + 8] for i in (8, 24)])
  graded = grade(hanging, texts, group_sizes=[8] * 10, verifier_only=True)
  expected = [x not in hanging.hanging_texts for x in texts]
  assert graded.rewards.tolist() == expected
  assert graded.counts["switched_off"] == 0
  assert graded.counts["timeouts"] == 80 - sum(expected)
  (line,) = hanging.pop_warnings()
  assert "'f' gave no answer within 5 s on 8 completions of a prompt;" in line
  boxes = [rf"\boxed{{x^{x}}}" for x in range(30)]
  hanging.hanging_texts |= {*boxes}
  assert grade(hanging, boxes).counts["timeouts"] >= 30
