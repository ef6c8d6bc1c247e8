"""A shipped config runs unchanged on any number of devices."""

import types

import pytest

from dppo_jax import sharding
from dppo_jax.run import preflight, setup
from dppo_jax.run.description import description
from dppo_jax.step import programs
from tests.helpers import commands

FILES = sorted(x.stem for x in commands.ROOT.glob("configs/[a-z]*.py"))


def _mesh(data, replicas=1):
  shape = {"replica": replicas, "data": data, "model": 1}
  return types.SimpleNamespace(shape=shape)


@pytest.mark.parametrize("file", FILES)
def test_prompts_divide_over_up_to_16_devices(file):
  preflight.check_training(_mesh(16), commands.config(file))


@pytest.mark.parametrize("num_devices", [1, 2, 8])
def test_rows_and_slots_count_one_devices(num_devices):
  """The default config fits each mesh; only its data axis changes."""
  c = commands.config(
    "arithmetic",
    mesh__data=num_devices,
    data__train="arithmetic:64",
    sft__steps=0,
  )
  run = setup.setup_run(c)
  rows = run.spec.packing.rows_per_micro
  assert rows == num_devices * c.pack.rows_per_micro
  text = " ".join(description(run, c).split())
  assert f"micro-batches of {rows} rows" in text
  assert "in 64 slots a device" in text


def test_prompts_that_do_not_divide_are_rejected_by_name():
  mesh = _mesh(5)
  with pytest.raises(ValueError, match=r"prompts_per_step is 32 .* 5 devices"):
    preflight.check_training(mesh, commands.config("arithmetic"))
  c = commands.config("arithmetic", mesh__replicas=3)
  with pytest.raises(ValueError, match=r"6 devices of .*data x .*replicas"):
    preflight.check_training(_mesh(2, replicas=3), c)


@pytest.mark.parametrize(
  ("shape", "slices"),
  [
    ((2, 2, 2), [[0], [1]]),  # of each replica
    ((4, 1, 2), [[0], [0], [1], [1]]),
    ((1, 4, 2), [[0, 1]]),
    ((1, 1, 8), [[0, 1]]),  # where there is no other way
  ],
)
def test_a_replica_is_on_one_slice_where_it_can_be(shape, slices):
  devices = [
    types.SimpleNamespace(
      id=i,
      platform="gpu",
      device_kind="imaginary",
      process_index=0,
      slice_index=i % 2,
    )
    for i in range(8)
  ]
  mesh = sharding._arrange(devices, shape)
  assert sorted(x.id for x in mesh.flat) == list(range(8))
  slices_of_replicas = [
    sorted({x.slice_index for x in replica.flat}) for replica in mesh
  ]
  assert slices_of_replicas == slices
  models = mesh.reshape(-1, shape[2])
  if shape[2] == 2:  # which stay on a slice
    assert all(len({x.slice_index for x in model}) == 1 for model in models)


@pytest.mark.parametrize(
  ("platform", "flags", "options"),
  [
    ("cpu", "", {"xla_backend_optimization_level": 1}),
    ("cpu", "--xla_backend_optimization_level=3", {}),
    ("gpu", "", {}),
  ],
)
def test_level_of_a_user_is_kept(monkeypatch, platform, flags, options):
  monkeypatch.setenv("XLA_FLAGS", flags)
  assert programs.compiler_options(platform) == options
