"""The programs in experiments/examples run."""

import os
import runpy
import subprocess
import sys

import pytest

from dppo_jax import config as configs
from dppo_jax import data
from tests.helpers import commands

FOLDER = commands.ROOT / "experiments" / "examples"


@pytest.mark.slow
def test_training_loop_learns():
  variables = runpy.run_path(str(FOLDER / "train_loop.py"))
  first, *_, last = variables["history"]
  assert last > first + 0.5


@pytest.mark.slow
def test_a_step_without_a_config_learns():
  path = FOLDER / "train_step.py"
  variables = runpy.run_path(str(path), run_name="__main__")
  first, *_, last = variables["history"]
  assert first < 0.2 and last > 0.9


def test_checkpoint_is_sampled(tmp_path, monkeypatch, capsys):
  pytest.importorskip("torch")
  from tests.helpers import checkpoints

  checkpoints.write(tmp_path, vocab_size=32, eos_token_id=1)
  data.CharacterTokenizer().save(tmp_path)
  words = ["sample_checkpoint.py", str(tmp_path), "1+2=", "--samples=3"]
  monkeypatch.setattr(sys, "argv", words)
  runpy.run_path(str(FOLDER / "sample_checkpoint.py"), run_name="__main__")
  assert capsys.readouterr().out.count("mean log-probability -") == 3


def test_sweep_starts_valid_runs_and_compares_them(tmp_path):
  """A stand-in for python makes the workdirs and writes the commands down."""
  python = tmp_path / "python"
  python.write_text(
    """#!/bin/sh
echo "$@" >> "$LOG"
for word; do case $word in --workdir=*) mkdir -p "${word#*=}";; esac; done
"""
  )
  python.chmod(0o755)
  log = tmp_path / "log"
  path = f"{tmp_path}:{os.environ['PATH']}"
  subprocess.run(
    [FOLDER / "sweep.sh", tmp_path / "runs", "--config.steps=7"],
    env=os.environ | {"PATH": path, "LOG": str(log)},
    cwd=commands.ROOT,
    check=True,
  )
  *runs, comparison = [x.split() for x in log.read_text().splitlines()]
  rates = set()
  for _, module, *words in runs:
    assert module == "dppo_jax.main"
    config = commands.parse(words)
    configs.validate(config)
    assert config.steps == 7
    rates.add((config.method.name, config.optimizer.learning_rate))
  methods = ("grpo", "neyman")
  assert rates == {(x, y) for x in methods for y in (1e-6, 2e-6, 4e-6)}
  assert comparison[1] == "dppo_jax.analysis.compare"
  assert len(comparison) == 2 + 6 + 1
