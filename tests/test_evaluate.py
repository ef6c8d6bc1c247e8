"""The mode evaluate: of a run, of a checkpoint, of several sets."""

import collections
import json
import re

import commands
import jax
import numpy as np
import pytest
import sources

from dppo_jax import config as configs
from dppo_jax import evaluate, train
from dppo_jax.eval import sets as eval_sets

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick_compiler")]

SMALL = {
  "steps": 2,
  "model__shape__layers": 1,
  "model__shape__embed": 16,
  "model__shape__mlp": 32,
  "model__shape__head_dim": 8,
  "data__num_arithmetic": 100,
  "data__max_operations": 1,
  "data__prompts_per_step": 8,
  "data__eval_limit": 10,
  "rollout__group_size": 4,
  "rollout__max_tokens": 8,
  "rollout__num_slots": 4,
  "pack__row_length": 24,
  "pack__rows_per_micro": 8,
  "sft__steps": 150,
  "eval__prompts": 8,
}


def _config(**overrides) -> configs.Config:
  return commands.config("arithmetic", **SMALL | overrides)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
  workdir = tmp_path_factory.mktemp("trained")
  train.run(_config(), workdir)
  return workdir


def _rows(number, **columns):
  rows = [{"problem": f"{i}+1=", "answer": str(i + 1)} for i in range(number)]
  return [row | columns | {"level": i % 2} for i, row in enumerate(rows)]


OPTIONS = {"eval__samples": 4, "eval__temperature": 0.7}


@pytest.fixture(scope="module")
def sets(tmp_path_factory):
  """The option that names three sets."""
  home = tmp_path_factory.mktemp("sets")
  paths = {
    name: sources.write_jsonl(home / f"{name}.jsonl", _rows(number))
    for name, number in (("one", 9), ("two", 3))
  }
  return f"short=arithmetic,one={paths['one']},two={paths['two']}"


@pytest.fixture(scope="module")
def done(trained, sets):
  """What the command line says that evaluates the run on them."""
  before = (trained / "config.json").read_text()
  done = commands.command(
    "--mode=evaluate",
    f"--workdir={trained}",
    f"--config.data.eval={sets}",
    "--config.data.train=missing.jsonl",
    *(f"--config.{k.replace('__', '.')}={v}" for k, v in OPTIONS.items()),
  )
  assert done.returncode == 0, done.stderr
  assert (trained / "config.json").read_text() == before
  (trained / "evaluation/step-2").rename(trained / "evaluation/told")
  return done.stdout


def _results(workdir, step="step-2"):
  directory = workdir / "evaluation" / step
  lines = (directory / "completions.jsonl").read_text().splitlines()
  results = json.loads((directory / "results.json").read_text())
  return results, [json.loads(line) for line in lines]


def test_the_command_line_evaluates_several_sets(trained, done):
  results, lines = _results(trained, "told")
  assert {x: y["problems"] for x, y in results["sets"].items()} == {
    "short": 10,
    "one": 9,
    "two": 3,
  }
  assert results["step"] == 2 and "step 2 of" in results["weights"]
  assert "temperature 0.7" in results["sampling"]
  assert len(lines) == 22 * 5
  assert list(results["sets"]["one"]["by"]["level"]) == ["0", "1"]
  for name in ("results.md", "results.png"):
    assert (trained / "evaluation/told" / name).stat().st_size > 0


def test_the_numbers_are_those_of_the_completions(trained, done):
  results, lines = _results(trained, "told")
  for name, of_set in results["sets"].items():
    of = lambda decoding, name=name: [
      x for x in lines if (x["set"], x["decoding"]) == (name, decoding)
    ]
    estimates = of_set["estimates"]
    for decoding, estimate in (("greedy", "greedy"), ("sampled", "avg@4")):
      right = [x["correct"] for x in of(decoding)]
      assert estimates[estimate]["value"] == pytest.approx(np.mean(right))
    by_problem = collections.defaultdict(list)
    for line in of("sampled"):
      by_problem[line["id"]].append(line["correct"])
    solved = np.mean([max(x) for x in by_problem.values()])
    assert estimates["pass@4"]["value"] == pytest.approx(solved)
  for line in lines:
    assert line["correct"] == (line["extracted"] == line["answer"])
    assert 1 <= line["tokens"] <= 8
    assert line["stopped"] or line["tokens"] == 8


def test_the_terminal_is_short_and_narrow(done):
  lines = [x for x in done.splitlines() if not x.startswith("results:")]
  assert any("weights: step 2 of" in line for line in lines)
  assert max(map(len, lines)) <= 80
  assert any(re.match(r"short +10  greedy +0\.", line) for line in lines)
  assert len(lines) < 40


def test_what_a_set_samples_does_not_depend_on_the_others(
  trained, done, sets, capsys
):
  for _ in range(2):
    evaluate.run(
      _config(data__eval=sets.rpartition(",")[0], **OPTIONS), trained
    )
  _, before = _results(trained, "told")
  for step in ("step-2", "step-2.1"):
    _, lines = _results(trained, step)
    assert lines == [x for x in before if x["set"] != "two"]
  assert "earlier results of step-2 are now in" in capsys.readouterr().out


def test_sets_have_random_numbers_of_their_own():
  at = lambda *args: jax.random.key_data(
    eval_sets.rng_of_set(jax.random.key(0), *args).key
  ).tolist()
  assert at("a", 0) == at("b", 0)  # the first, whatever its name
  assert at("a", 1) == at("a", 2) != at("b", 1)


def test_greedy_accuracy_is_that_of_training(trained):
  evaluate.run(_config(), trained)
  evaluate.run(_config(), trained, 0)
  lines = (trained / "metrics.jsonl").read_text().splitlines()
  lines = [json.loads(line) for line in lines]
  told = {x["step"]: x["eval/accuracy"] for x in lines if "eval/accuracy" in x}
  for step in (0, 2):
    results, _ = _results(trained, f"step-{step}")
    greedy = results["sets"]["arithmetic"]["estimates"]["greedy"]
    assert greedy["value"] == pytest.approx(told[step])
  assert told[2] > 0  # or the test would say nothing


def test_a_step_or_a_model_that_is_not_the_runs_is_refused(trained):
  with pytest.raises(ValueError, match=r"no checkpoint 7 .* there are 0, 2"):
    evaluate.run(_config(), trained, 7)
  with pytest.raises(ValueError, match=r"config.model.shape is"):
    evaluate.run(_config(model__shape__layers=2), trained)
  with pytest.raises(ValueError, match=r"config.data.eval is empty"):
    evaluate.run(_config(data__eval=""), trained)


def test_training_tells_of_every_set_and_of_several_samples(tmp_path):
  path = sources.write_jsonl(tmp_path / "own.jsonl", _rows(4))
  c = _config(
    steps=0, data__eval=f"made=arithmetic,own={path}", eval__samples=3
  )
  train.run(c, tmp_path / "run")
  (line,) = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
  metrics = json.loads(line)
  for stage in ("eval", "eval/own"):
    for name in ("accuracy", "stderr", "tokens", "stopped"):
      assert f"{stage}/{name}" in metrics
    assert (
      metrics[f"{stage}/accuracy"]
      <= metrics[f"{stage}/pass_at_2"]
      <= metrics[f"{stage}/pass_at_3"]
    )
  samples = (tmp_path / "run/samples.jsonl").read_text().splitlines()
  splits = [json.loads(x)["split"] for x in samples]
  assert set(splits) == {"eval", "eval/own"}


def test_without_checkpoints_the_weights_are_those_to_start_from(
  tmp_path, capsys
):
  evaluate.run(_config(data__train=""), tmp_path)
  assert "weights: random" in capsys.readouterr().out
  assert _results(tmp_path, "step-0")[0]["sets"]["arithmetic"]["samples"] == 0
