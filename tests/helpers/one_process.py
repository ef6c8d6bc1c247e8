"""`python -m dppo_jax.main` as one process of several, compiled fast.

With EXPERTS in the environment the model has experts, and the processes' clocks
differ.
"""

import dataclasses
import os
import sys

import jax
from jax._src import cache_key

from dppo_jax import distributed, main
from dppo_jax.models.moe import Experts
from dppo_jax.run import setup
from dppo_jax.step.clock import StageClock

METRICS = StageClock.metrics
EXPERTS = Experts(num=4, per_token=2, mlp=16, is_normalized=True)


def with_experts(describe_model):
  """Makes `setup.describe_model` return experts in place of the MLP."""
  return lambda *args: dataclasses.replace(
    describe_model(*args), experts=EXPERTS
  )


def own_clock(clock: StageClock) -> dict[str, float]:
  """Metrics of a clock that differs between processes.

  An update takes most of a step in the first process, and next to nothing in
  the others.
  """
  update = 0.01 if distributed.index() else 9.0
  return METRICS(clock) | {"update/seconds": update, "step/seconds": update + 1}


def mute_transport() -> None:
  """Drops what Gloo writes to standard output, in pieces between our lines."""
  sys.stdout = os.fdopen(os.dup(1), "w", buffering=1)
  nowhere = os.open(os.devnull, os.O_WRONLY)
  os.dup2(nowhere, 1)
  os.close(nowhere)


if __name__ == "__main__":
  mute_transport()
  # On CPU, the cache key of a compiled program includes the devices of the
  # process, so the first process would compile for itself alone. Without them
  # it compiles for all.
  if hasattr(cache_key, "_hash_devices"):
    cache_key._hash_accelerator_config = cache_key._hash_devices
    jax.config.update("jax_share_binary_between_hosts", True)
  if "EXPERTS" in os.environ:
    setup.describe_model = with_experts(setup.describe_model)
    StageClock.metrics = own_clock
  main.run()
