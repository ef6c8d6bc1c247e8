"""A run killed anywhere and started again ends as if nothing had been."""

import os
import pathlib
import subprocess
import sys

import kill
import pytest

pytestmark = pytest.mark.slow


def test_a_run_killed_at_every_place_ends_bit_equal():
  """Weights, optimizer, history, metrics, samples and TensorBoard's events.

  In a process of its own, as JAX forks badly once it has seen a device.
  """
  done = subprocess.run(
    [sys.executable, pathlib.Path(kill.__file__), "--places"],
    env=os.environ | {"JAX_PLATFORMS": "cpu"},
    capture_output=True,
    check=False,
    text=True,
  )
  assert done.returncode == 0, done.stderr[-3000:]
  *places, last = done.stdout.splitlines()
  assert set(places) == {
    *(f"killed at {place}" for place in kill.PLACES),
    *(f"ended by {fault}" for fault in kill.FAULTS),
  }
  assert last == "the same as undisturbed"
