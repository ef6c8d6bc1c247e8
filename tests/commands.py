"""Configs and runs, as the command line makes them."""

import os
import pathlib
import subprocess
import sys

from absl import flags
from ml_collections import config_flags

from dppo_jax.config import Config

ROOT = pathlib.Path(__file__).parents[1]


def config(file: str, **overrides) -> Config:
  """The config of `configs/FILE.py`; `rollout__top_k=2` overrides a field."""
  return parse(_flags(file, overrides))


def parse(words: list[str]) -> Config:
  """The config that the flags of a command line make."""
  values = flags.FlagValues()
  argv = ["main", *words]
  holder = config_flags.DEFINE_config_file(
    "config", flag_values=values, sys_argv=argv
  )
  values(argv)
  return holder.value


def main(file: str, *more: str, **overrides) -> subprocess.CompletedProcess:
  """What `python -m dppo_jax.main` does under that config and `more` flags."""
  return command(*_flags(file, overrides), *more)


def command(*argv: str) -> subprocess.CompletedProcess:
  """`python -m dppo_jax.main ARGV`, on the one device that a CPU is."""
  return subprocess.run(
    [sys.executable, "-m", "dppo_jax.main", *argv],
    cwd=ROOT,
    env=os.environ | {"JAX_PLATFORMS": "cpu"},
    capture_output=True,
    check=False,
    text=True,
  )


def _flags(file: str, overrides: dict) -> list[str]:
  name, colon, method = file.partition(":")
  path = ROOT / "configs" / f"{name}.py"
  return [
    f"--config={path}{colon}{method}",
    *(f"--config.{k.replace('__', '.')}={v}" for k, v in overrides.items()),
  ]
