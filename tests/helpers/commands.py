"""Configs and processes of command lines."""

import os
import pathlib
import subprocess
import sys

from dppo_jax.config import Config, cli

ROOT = pathlib.Path(__file__).parents[2]


def config(file: str, **overrides) -> Config:
  """The config of `configs/FILE.py`; `rollout__top_k=2` overrides an option.

  Its method is dppo by default, since neyman depends on measured times.
  """
  return parse(_flags(file, overrides))


def parse(words: list[str]) -> Config:
  """The config of a command line."""
  return cli.parse(["main", *words])[0]


def main(file: str, *more: str, **overrides) -> subprocess.CompletedProcess:
  """Runs `python -m dppo_jax.main` with that config and `more` flags."""
  return command(*_flags(file, overrides), *more)


def command(*argv: str) -> subprocess.CompletedProcess:
  """Runs `python -m dppo_jax.main ARGV` on one CPU device."""
  return subprocess.run(
    [sys.executable, "-m", "dppo_jax.main", *argv],
    cwd=ROOT,
    env=os.environ | {"JAX_PLATFORMS": "cpu"},
    capture_output=True,
    check=False,
    text=True,
  )


def _flags(file: str, overrides: dict) -> list[str]:
  name, _, method = file.partition(":")
  path = ROOT / "configs" / f"{name}.py"
  return [
    f"--config={path}:{method or 'dppo'}",
    *(f"--config.{k.replace('__', '.')}={v}" for k, v in overrides.items()),
  ]
