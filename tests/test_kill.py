"""A run that is killed at any point and resumed equals an undisturbed run."""

import os
import subprocess
import sys

import pytest

from tests.helpers import commands, kill, killed_run, servers

pytestmark = pytest.mark.slow


def test_killed_run_ends_bit_identical():
  """Weights, optimizer, history, metrics, samples and TensorBoard's events.

  Runs in its own process, because forking is unsafe once JAX has a device.
  """
  *places, last = _output("--places")
  assert set(places) == {
    *(f"killed at {place}" for place in killed_run.places(in_bucket=False)),
    *(f"ended by {fault}" for fault in killed_run.FAULTS),
  }
  assert last == "the same as undisturbed"


def test_killed_run_in_a_bucket_ends_bit_identical():
  """Each time on another machine, which has nothing but the bucket."""
  servers.skip_without("gs")
  *places, last = _output("--places", "--bucket")
  expected = killed_run.places(in_bucket=True)
  assert places == [f"killed at {place}" for place in expected]
  assert last == "the same as undisturbed"


def test_killed_process_of_two_in_a_bucket_ends_bit_identical():
  """Resumed in one process with both devices, then again in two."""
  servers.skip_without("gs")
  lines = _output("--places", "--processes=2", "--bucket")
  assert lines == [
    "killed one process",
    "killed the only process",
    "the same as undisturbed",
  ]


def _output(*options: str) -> list[str]:
  done = subprocess.run(
    [sys.executable, "-m", kill.__name__, *options],
    cwd=commands.ROOT,
    env=os.environ | {"JAX_PLATFORMS": "cpu"},
    capture_output=True,
    check=False,
    text=True,
  )
  assert done.returncode == 0, done.stderr[-3000:]
  return done.stdout.splitlines()
