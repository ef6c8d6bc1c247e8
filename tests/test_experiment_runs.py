"""Experiments run for hours: their programs run here on tiny work.

Training programs of their own are not started. Their options are parsed, and
each leaves a copy of one short run.
"""

import importlib
import json
import shutil
import sys

import pytest

from dppo_jax import train
from experiments.common import processes, results, rings
from tests.helpers import commands


def _module(name: str):
  return importlib.import_module(f"experiments.{name}")


def _main(monkeypatch, program, *flags: str) -> None:
  monkeypatch.setattr(sys, "argv", ["run", *flags])
  program.main()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
  """A run of nine steps that logs what every experiment reads."""
  words = [
    "--config=experiments/common/arithmetic.py:"
    "experiments/09_when_it_pays/controls.py:baseline",
    "--config.steps=9",
    "--config.eval.every=3",
    "--config.data.prompts_per_step=4",
    "--config.data.eval_limit=16",
    "--config.sft.steps=100",
  ]
  workdir = tmp_path_factory.mktemp("trained")
  train.run(commands.parse(words), workdir)
  metrics = workdir / "metrics.jsonl"
  chosen = {"budget/completions": 0.5}  # what neyman adds
  rows = [chosen | row for row in results.read(metrics)]
  results.write(metrics, rows)
  return workdir


@pytest.fixture
def started(monkeypatch, trained, tmp_path):
  """The configs of the training programs that were started."""
  configs = []

  def execute(arguments, cores, log, env=None):
    _, *start, main = arguments[:3]
    assert (start, main) == (["-m"], "dppo_jax.main")
    configs.append(commands.parse(list(arguments[3:])))
    workdir = next(x for x in arguments if x.startswith("--workdir="))
    shutil.copytree(trained, workdir.partition("=")[2])
    log.write_text("")

  monkeypatch.setattr(processes, "execute", execute)
  monkeypatch.setattr(rings, "write", lambda *_, **__: None)
  return configs


def _redirect(monkeypatch, folder, *names: str) -> None:
  """Lets modules of an experiment write their results to `folder`."""
  for name in names:
    module = _module(name)
    monkeypatch.setattr(module, "HERE", folder)
    if hasattr(module, "RESULTS"):
      monkeypatch.setattr(module, "RESULTS", folder / "results.jsonl")


def test_first_run(monkeypatch, started, tmp_path):
  _redirect(monkeypatch, tmp_path, "01_first_run.run")
  flags = ("--seeds=1", f"--workdir={tmp_path / 'runs'}")
  _main(monkeypatch, _module("01_first_run.run"), *flags)
  assert [x.method.name for x in started] == ["dppo", "grpo", "neyman"]
  assert len(results.read(tmp_path / "results.jsonl")) == 3
  assert (tmp_path / "figure.png").exists()


def test_comparison(monkeypatch, started, tmp_path):
  program = _module("03_comparison.run")
  _redirect(monkeypatch, tmp_path, "03_comparison.run")
  flags = ("--seeds=2", "--cores=0", f"--workdir={tmp_path / 'runs'}")
  _main(monkeypatch, program, *flags)
  assert len(started) == 1 + 2 * len(program.VARIANTS)
  assert (tmp_path / "table.csv").exists() and (
    tmp_path / "figure.png"
  ).exists()


def test_when_it_pays(monkeypatch, started, tmp_path):
  _redirect(monkeypatch, tmp_path, "09_when_it_pays.run")
  flags = ("--seeds=1", "--cores=0", f"--root={tmp_path / 'runs'}")
  program = _module("09_when_it_pays.run")
  _main(monkeypatch, program, *flags, "--cells=arithmetic, 4")
  assert len(results.read(tmp_path / "predictions.jsonl")) == 8
  assert len(results.read(tmp_path / "results.jsonl")) == len(started) - 1
  assert (tmp_path / "table.csv").exists() and (
    tmp_path / "figure.png"
  ).exists()


def test_equal_seconds(monkeypatch, started, tmp_path):
  modules = [f"11_equal_seconds.{x}" for x in ("run", "report")]
  _redirect(monkeypatch, tmp_path, *modules)
  flags = ("--tasks=arithmetic", "--cores=0", f"--workdir={tmp_path / 'runs'}")
  for stage in ("rates", "seeds", "report"):
    _main(monkeypatch, _module(modules[0]), *flags, f"--stage={stage}")
  assert len(results.read(tmp_path / "results.jsonl")) == len(started) - 1
  assert list(tmp_path.glob("*.png")) and list(tmp_path.glob("*.csv"))


def test_lora(monkeypatch, started, tmp_path):
  program = _module("14_lora.run")
  _redirect(monkeypatch, tmp_path, "14_lora.run")
  flags = ("--seeds=1", "--cores=0", f"--workdir={tmp_path / 'runs'}")
  _main(monkeypatch, program, *flags)
  assert {x.lora.rank for x in started} == {0, 4, 16}
  assert (tmp_path / "table.csv").exists()


def test_real_model(monkeypatch, started, tmp_path):
  modules = [f"15_real_model.{x}" for x in ("run", "report", "fetch")]
  _redirect(monkeypatch, tmp_path, *modules[:2])
  monkeypatch.setattr(_module(modules[2]), "fetch", lambda name: tmp_path)
  program = _module(modules[0])
  for stage in ("tune", "methods", "few", "epochs", "report"):
    flags = (f"--stage={stage}", f"--workdir={tmp_path / 'runs'}")
    _main(monkeypatch, program, *flags)
  cells = {*program.TUNE, *program.METHODS, *program.FEW, *program.EPOCHS}
  assert len(results.read(tmp_path / "results.jsonl")) == len(cells)
  assert (tmp_path / "table.csv").exists() and (
    tmp_path / "figure.png"
  ).exists()


def test_grading(monkeypatch, tmp_path):
  _redirect(monkeypatch, tmp_path, "07_grading.run")
  flags = ("--number=8", "--workers=1", "--parts=honest")
  _main(monkeypatch, _module("07_grading.run"), *flags)
  (row,) = results.read(tmp_path / "results.jsonl")
  assert row["cores"] and not row["answers"]
  print(json.dumps(row))


def test_ledger(monkeypatch, tmp_path):
  """Every stage of two prompts, at one budget and with few rules."""
  names = "run batch completions tokens prefixes rollouts sampling baselines"
  names += " group_sizes prompts law seconds"
  modules = {x: _module(f"02_design_variance.{x}") for x in names.split()}
  for module in modules.values():
    monkeypatch.setattr(module, "DRAWS", 3, raising=False)
    if hasattr(module, "BUDGETS"):
      monkeypatch.setattr(module, "BUDGETS", (0.25,))
  every = modules["completions"].by_share
  few = lambda sampled: {x: every(sampled)[x] for x in ("neyman", "pods")}
  monkeypatch.setattr(modules["completions"], "by_share", few)
  monkeypatch.setattr(modules["tokens"], "NAMES", ("neyman, tokens",))
  monkeypatch.setattr(modules["seconds"], "TURNS", 1)
  rules = [*modules["sampling"].RULES.items()][-2:]
  monkeypatch.setattr(modules["sampling"], "RULES", dict(rules))
  program = modules["run"]

  source = "def f(completions): return [len(x) % 2 for x in completions]"
  (tmp_path / "odd.py").write_text(source)  # most groups have both rewards

  def grpo_config(task):
    config = commands.parse(["--config=experiments/common/arithmetic.py:grpo"])
    config.sft.steps, config.rollout.max_tokens = 0, 8
    config.data.eval, config.pack.row_length = "", 32
    config.reward.functions = f"{tmp_path}/odd.py:f"
    return config

  monkeypatch.setattr(program.tasks, "grpo_config", grpo_config)
  program.measure("arithmetic", tmp_path, num_prompts=3)
  rows = program.collect(tmp_path.parent, [tmp_path.name])
  assert {row["level"] for row in rows} == {*program.STAGES}
