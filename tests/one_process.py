"""`python -m dppo_jax.main` as one process of several, quick to compile.

With EXPERTS in the environment the model made on the spot has experts, and the
processes' clocks differ.
"""

import dataclasses
import os
import sys

import jax
from jax._src import cache_key

from dppo_jax import main, train
from dppo_jax.models.moe import Experts
from dppo_jax.run import distributed, setup
from dppo_jax.step import programs

EXPERTS = Experts(num=4, per_token=2, mlp=16, is_normalized=True)


def with_experts(describe_model):
  """`setup_run.describe_model`, with experts in place of the MLP."""
  return lambda *args: dataclasses.replace(
    describe_model(*args), experts=EXPERTS
  )


def costs_by_own_clock(values):
  """`costs.of_step`, where it says something else in every process.

  An update takes most of a step in the first, and next to nothing in others. It
  goes by tokens, not by micro-batches, of which devices share the rows.
  """
  update = 0.01 if distributed.index() else 9.0
  seconds = {"steps": 1.0, "update": update, "rollout": 1.0, "step": update + 1}
  return seconds | {
    "micros": 100.0,
    "rows": 1e9,
    "trained": 1.0,
    "generated": 1.0,
  }


def mute_transport() -> None:
  """Leaves the output to what Python prints.

  Gloo writes how many peers it found to the process's standard output, in
  pieces that those of another thread may part.
  """
  sys.stdout = os.fdopen(os.dup(1), "w", buffering=1)
  nowhere = os.open(os.devnull, os.O_WRONLY)
  os.dup2(nowhere, 1)
  os.close(nowhere)


if __name__ == "__main__":
  mute_transport()
  # On a CPU the key of a compiled program says which devices are this
  # process's: what the first one keeps would serve it alone. Without that it
  # serves all, and what the first one compiles it hands to the others.
  if hasattr(cache_key, "_hash_devices"):
    cache_key._hash_accelerator_config = cache_key._hash_devices
    jax.config.update("jax_share_binary_between_hosts", True)
  programs.compile_program = lambda lowered, platform: lowered.compile()
  if "EXPERTS" in os.environ:
    setup.describe_model = with_experts(setup.describe_model)
    train.of_step = costs_by_own_clock
  main.run()
