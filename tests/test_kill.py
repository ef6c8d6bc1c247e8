"""A run that is killed at any point and resumed equals an undisturbed run."""

import os
import subprocess
import sys

import pytest

from tests.helpers import commands, kill, servers

pytestmark = pytest.mark.slow


def test_killed_run_ends_bit_identical():
  """Weights, optimizer, history, metrics, samples and TensorBoard's events.

  Runs in its own process, because forking is unsafe once JAX has a device.
  """
  *places, last = _output("--places")
  assert set(places) == {
    *(f"killed at {place}" for place in kill.places(in_bucket=False)),
    *(f"ended by {fault}" for fault in kill.FAULTS),
  }
  assert last == "the same as undisturbed"


def test_killed_run_in_a_bucket_ends_bit_identical():
  """Each time on another machine, which has nothing but the bucket."""
  servers.skip_without("gs")
  *places, last = _output("--places", "--bucket=gs")
  expected = kill.places(in_bucket=True)
  assert places == [f"killed at {place}" for place in expected]
  assert last == "the same as undisturbed"


def test_killed_processes_in_a_bucket_end_bit_identical():
  """Each has a copy of its own, with its part of every checkpoint."""
  servers.skip_without("s3")
  options = "--only=kill --times=1 --processes=2 --bucket=s3"
  *_, last = _output(*options.split())
  assert last.strip() == "all ended as the undisturbed one"


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
