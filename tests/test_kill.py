"""A run that is killed at any point and resumed equals an undisturbed run."""

import os
import subprocess
import sys

import pytest

from tests.helpers import commands, kill

pytestmark = pytest.mark.slow


def test_killed_run_ends_bit_identical():
  """Weights, optimizer, history, metrics, samples and TensorBoard's events.

  Runs in its own process, because forking is unsafe once JAX has a device.
  """
  done = subprocess.run(
    [sys.executable, "-m", kill.__name__, "--places"],
    cwd=commands.ROOT,
    env=os.environ | {"JAX_PLATFORMS": "cpu"},
    capture_output=True,
    check=False,
    text=True,
  )
  assert done.returncode == 0, done.stderr[-3000:]
  *places, last = done.stdout.splitlines()
  assert set(places) == {
    *(f"killed at {place}" for place in kill.places()),
    *(f"ended by {fault}" for fault in kill.FAULTS),
  }
  assert last == "the same as undisturbed"
