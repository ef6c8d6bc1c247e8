"""A callback that ends a run after the CPU seconds in EQUAL_SECONDS."""

import os

from dppo_jax.errors import StopTraining

_spent = [0.0]


def after_step(done, info, state):
  """Ends the run once its steps have taken long enough."""
  _spent[0] += info.scalars["step/cpu_seconds"]
  if _spent[0] >= float(os.environ["EQUAL_SECONDS"]):
    raise StopTraining
