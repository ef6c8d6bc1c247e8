"""Compiles a run for TPUs that are not there: does it fit, with which kernels?

  pip install "jax[tpu]"
  python experiments/04_speed/plan.py --config=configs/arithmetic.py:grpo \
    --topology=v5e:2x2 --config.mesh.data=2 --config.mesh.model=2 \
    --config.pack.row_length=256 [--config.model.embed=1024 ...]

Memory is that of one device, as the compiler reports it. Weights are not made
and no data leaves the disk: the config's data must be readable here.
"""

import collections
import os
import re

os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

from absl import app, flags
import jax
from jax.experimental import topologies
from ml_collections import config_flags
import numpy as np

from dppo_jax import compiled, setup_run, sharding

TOPOLOGY = flags.DEFINE_string("topology", "v5e:2x2", "kind and shape")
CONFIG = config_flags.DEFINE_config_file("config")


def main(_) -> None:
  config = CONFIG.value
  mesh = topology_mesh(TOPOLOGY.value, config.mesh.data, config.mesh.model)
  run = setup_run.setup_run(config, mesh)
  # Abstract: what JAX computes at once, it computes on this machine.
  with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
    step = compiled.compile_step(run)
  shape = sharding.describe(mesh)
  print(f"{mesh.devices.flat[0].device_kind}, mesh {shape}")
  print(f"attention: {run.model.attention}")
  for name, stage in step._asdict().items():
    if hasattr(stage, "memory_analysis"):
      print(describe(name, stage))


def topology_mesh(topology: str, data: int, model: int) -> jax.sharding.Mesh:
  """A mesh of described TPUs; `data=-1` takes what `model` leaves."""
  devices = topologies.get_topology_desc(
    platform="tpu", topology_name=topology
  ).devices
  data = len(devices) // model if data == -1 else data
  return jax.sharding.Mesh(
    np.array(devices[: data * model]).reshape(1, data, model),
    sharding.MESH_AXES,
    axis_types=(jax.sharding.AxisType.Auto,) * 3,
  )


def describe(name: str, stage: jax.stages.Compiled) -> str:
  """A line on a stage: a device's memory, and its Pallas kernels."""
  used = stage.memory_analysis()
  held = used.argument_size_in_bytes + used.output_size_in_bytes
  held -= used.alias_size_in_bytes
  kernels = collections.Counter(
    re.findall(r"%(\w+)[.\d]* = .*\"tpu_custom_call\"", stage.as_text())
  )
  return (
    f"{name:>19}: {held / 2**20:8,.1f} MiB held, "
    f"{used.temp_size_in_bytes / 2**20:8,.1f} MiB temporary"
    + "".join(f", {count} x {kernel}" for kernel, count in kernels.items())
  )


if __name__ == "__main__":
  app.run(main)
