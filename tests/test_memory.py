"""A run that cannot fit is refused before anything is made."""

import commands
import jax
import numpy as np
import pytest
import small

from dppo_jax.models import transformer
from dppo_jax.run import memory
from dppo_jax.run.setup import setup_run
from dppo_jax.step import programs


def config(**overrides):
  return commands.config("arithmetic", sft__steps=0, **overrides)


def of_mesh(data=1, model=1):
  devices = np.array(jax.devices()[: data * model])
  shape = (1, data, model)
  return jax.sharding.Mesh(devices.reshape(shape), ("replica", "data", "model"))


@pytest.mark.parametrize(
  "overrides",
  [
    {"rollout__num_slots": 10**6, "data__prompts_per_step": 10**6},
    {"rollout__max_tokens": 10**6, "pack__row_length": 10**6},
    {"pack__rows_per_micro": 10**6},
    {"model__shape__embed": 65_536, "model__shape__layers": 1000},
    {"rollout__group_size": 65_536, "data__prompts_per_step": 10**5},
  ],
)
def test_a_run_that_cannot_fit_is_refused_in_one_line(overrides):
  with pytest.raises(ValueError, match=r"takes at least .* GB of") as error:
    setup_run(config(**overrides))
  assert "\n" not in str(error.value)
  for option in ("rollout.num_slots", "pack.rows_per_micro", "mesh.data"):
    assert f"config.{option}" in str(error.value)


def test_the_least_is_no_more_than_what_there_is():
  """The state of a run, to the byte, and less of all else than it takes."""
  run = setup_run(config())
  state = programs.abstract_train_state(run)
  parts = memory.least_bytes(run.mesh, run.model, run.config, trains=True)
  held = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state.params))
  assert parts["weights and optimizer"] == 3 * held
  copy = memory.least_bytes(run.mesh, run.model, run.config, trains=False)
  assert copy == {"weights": held}
  assert sum(parts.values()) < 1e9


def test_devices_share_the_weights():
  c = config()
  whole = memory.least_bytes(of_mesh(), small.MODEL, c, trains=False)
  parts = memory.least_bytes(of_mesh(2, 2), small.MODEL, c, trains=False)
  assert whole["weights"] == 4 * transformer.num_parameters(small.MODEL)
  assert parts["weights"] == whole["weights"] / 4


def test_simulated_devices_share_the_memory(monkeypatch):
  monkeypatch.setattr(memory, "_free_memory", lambda: 1000.0)
  with pytest.raises(ValueError, match=r"0.0 GB free for each of 4 CPU dev"):
    memory.check(of_mesh(4), small.MODEL, config(), trains=True)
  monkeypatch.setattr(memory, "_free_memory", lambda: None)  # nobody says
  memory.check(of_mesh(4), small.MODEL, config(), trains=True)
