"""Experiments run for hours: their programs run here on tiny work.

Training programs of their own are not started. Their options are parsed, and
each leaves a copy of one short run.
"""

import importlib
import shutil
import sys

import jax
import pytest

from dppo_jax import train
from dppo_jax.planning import targets
from experiments.common import machine, processes, results, rings, work
from tests.helpers import commands

pytestmark = pytest.mark.slow


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
    "--config.rollout.num_slots=8",
    "--config.sft.steps=100",
    "--config.log.writers=tensorboard,completions",
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
    workdir = workdir.partition("=")[2]
    shutil.copytree(trained, workdir, dirs_exist_ok=True)
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


def test_papers_protocol(monkeypatch, started, tmp_path):
  names = ("run", "report", "parts", "predict", "held_out")
  modules = [f"17_papers_protocol.{x}" for x in names]
  _redirect(monkeypatch, tmp_path, *modules[:-1])
  program, _, parts, predict, held_out = map(_module, modules)
  fetch = _module("15_real_model.fetch")
  monkeypatch.setattr(fetch, "fetch", lambda name: tmp_path)
  for name, task in program.TASKS.items():
    small = task._replace(problems=3 * program.PROMPTS)
    monkeypatch.setitem(program.TASKS, name, small)
  monkeypatch.setattr(program, "GROUP", 8)  # of the run that is copied
  monkeypatch.setattr(held_out, "KINDS", held_out.KINDS[:1])
  workdir = f"--workdir={tmp_path / 'runs'}"
  flags = ("--rows=GRPO as published;our grpo;d3s", "--seeds=0", "--epochs=3")
  _main(monkeypatch, program, *flags, workdir)
  lines = program.read()
  assert [x["epoch"] for x in lines if x["row"] == "our grpo"] == [0, 1, 2, 3]
  assert len(started) == 2 * 3 + 1 and len(lines) == 3 * 4
  _main(monkeypatch, program, *flags, workdir)  # nothing is repeated
  assert len(started) == 7
  _main(monkeypatch, program, "--task=words", *flags, workdir)
  assert len(program.read("words")) == 12
  first, *others = started[7:]
  assert not first.sft.from_run and len(others) == 7
  assert {x.sft.from_run for x in others} == {f"{tmp_path}/runs/start-0@3"}
  _main(monkeypatch, program, "--report")
  _main(monkeypatch, parts, workdir)
  _main(monkeypatch, predict)
  tables = ("single.csv", "words.csv", "parts.csv", "predictions.csv")
  tables += ("single.png", "words.png")
  assert all((tmp_path / x).exists() for x in tables)


def test_history_gains_what_settled_problems_cost():
  history = _module("17_papers_protocol.history")
  groups = [*([problem, 5] for problem in range(5)), [5, 2]]
  lines = [{"groups": groups}] * 3
  known = history.knowledge(lines)
  assert known.groups == 6 and known.true == pytest.approx(5 / 6)
  assert 0.7 < known.predicted < known.true
  possible, seen, *thresholds = known.gains
  assert 1 < possible < seen
  kept = [1 + 5 * (1 - rate) for rate in history.RATES]  # of the six
  assert thresholds == pytest.approx([6 / x for x in kept])


@pytest.fixture
def tiny(monkeypatch):
  """A work that takes seconds, and the rates of a machine that has none."""
  small = work.WORKS["small"]
  model = {"layers": 1, "embed": 32, "heads": 2, "kv_heads": 1, "head_dim": 16}
  model = work.with_model(small, mlp=32, vocab=64, **model).model
  rows = small.rows._replace(row_length=64)
  sizes = {"prompts": 4, "group_size": 4, "prompt_tokens": (4, 8), "slots": 4}
  tiny = small._replace(
    model=model, rows=rows, max_tokens=8, mean_tokens=4, **sizes
  )
  monkeypatch.setitem(work.WORKS, "tiny", tiny)
  rates = {"float32_flops": 1e9, "bfloat16_flops": 1e9, "bytes": 1e9}
  monkeypatch.setattr(machine, "yardstick", lambda repeats: rates)
  timed = machine.timed
  monkeypatch.setattr(machine, "timed", lambda f, repeats: timed(f, 1))


def test_speed(monkeypatch, tiny, tmp_path):
  parts = "pruning,sharing,selection"
  path = tmp_path / "results.jsonl"
  flags = ("--work=tiny", f"--parts={parts}", f"--results={path}")
  _main(monkeypatch, _module("04_speed.run"), *flags)
  assert {x["part"] for x in results.read(path)} == {*parts.split(",")}
  assert (tmp_path / "table.txt").exists()


def test_accelerator(monkeypatch, tiny, tmp_path):
  program = _module("05_accelerator.run")
  here = lambda name, args, _: program._run_one(*name.split(":"), args.results)
  monkeypatch.setattr(program, "_in_a_process", here)
  checks, decoding = (
    _module(f"05_accelerator.{x}") for x in ("checks", "decoding")
  )
  monkeypatch.setattr(checks, "_all_reduce", lambda: 1e9)  # of 2 GiB
  monkeypatch.setattr(decoding, "STEPS", 2)
  monkeypatch.setitem(work.WORKS, "small", work.WORKS["tiny"])
  path = tmp_path / "results.jsonl"
  _main(monkeypatch, program, "--models=tiny", f"--results={path}")
  rows = results.read(path)
  assert {x["item"].partition(":")[0] for x in rows} == {*program.ITEMS}
  assert all(row.get("is_right", True) for row in rows)
  assert (tmp_path / "table.md").exists()


def test_plan(monkeypatch, tmp_path):
  program = _module("08_plan.run")
  _redirect(monkeypatch, tmp_path, "08_plan.run")
  monkeypatch.setattr(
    program,
    "configured",
    lambda case: commands.parse(
      [f"--config=configs/{case.config}.py", "--config.mesh.data=4"]
    ),
  )
  monkeypatch.setattr(targets, "devices", lambda _: jax.devices()[:4])
  stage = lambda run, task, names: (
    targets.CompiledStage(name, 2**30, 2**20, 1.0) for name in names
  )
  monkeypatch.setattr(targets, "compile_stages", stage)
  _main(monkeypatch, program, "arithmetic")
  rows = results.read(tmp_path / "results.jsonl")
  assert [x["stage"] for x in rows] == [*program.STAGES]
  assert "arithmetic" in (tmp_path / "table.csv").read_text()


def test_history_baseline(monkeypatch, started, tmp_path):
  modules = [f"16_history_baseline.{x}" for x in ("run", "report")]
  _redirect(monkeypatch, tmp_path, *modules)
  program = _module(modules[0])
  monkeypatch.setattr(program.os, "sched_setaffinity", lambda *_: None)
  shapes = (4, 1, "snapped"), (2, 2, "leave-one-out")
  monkeypatch.setattr(program, "SHAPES", shapes)
  monkeypatch.setattr(_module(modules[1]), "FEWEST", 1)
  task = program.Task(8, 4, (8.0,), (10,))
  monkeypatch.setattr(program, "TASKS", {"arithmetic": task})
  for stage in ("train", "report"):
    _main(
      monkeypatch, program, f"--stage={stage}", f"--workdir={tmp_path / 'runs'}"
    )
  rows = results.read(tmp_path / "results.jsonl")
  assert [x["completions"] for x in rows] == [[0, 4, 8]] * 2
  assert (tmp_path / "arithmetic.csv").exists()
