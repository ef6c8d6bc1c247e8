"""Compiles a run's rooms for TPUs that are not there, and says what they take.

  pip install "jax[tpu]"
  python experiments/04_speed/plan.py --config=configs/arithmetic.py:grpo \
    --topology=v5e:2x2 [--config.model.embed=1024 ...]

Memory is that of one device, by the compiler's own account. Weights are not
made and no data leaves the disk: the config's data must be readable here.
"""

import dataclasses
import os

os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

from absl import app, flags
import jax
from jax.experimental import topologies
from ml_collections import config_flags
import numpy as np

from dppo_jax import sharding

TOPOLOGY = flags.DEFINE_string("topology", "v5e:2x2", "kind and shape")
ATTENTION = flags.DEFINE_string("attention", "splash", "which kernel")
CONFIG = config_flags.DEFINE_config_file("config")


def main(_) -> None:
  config = CONFIG.value
  data, model = config.mesh.data, config.mesh.model
  config.mesh.data = config.mesh.model = 1  # this machine's
  furnished = setup_run.setup_run(config)
  devices = topologies.get_topology_desc(
    platform="tpu", topology_name=TOPOLOGY.value
  ).devices
  data = len(devices) // model if data == -1 else data
  mesh = jax.sharding.Mesh(
    np.array(devices[: data * model]).reshape(data, model),
    sharding.MESH_AXES,
    axis_types=(jax.sharding.AxisType.Auto,) * 2,
  )
  setup_run.check_batches(mesh, config)
  setup_run.check_weights(mesh, furnished.model)
  planned = furnished._replace(
    mesh=mesh,
    model=dataclasses.replace(furnished.model, attention=ATTENTION.value),
  )
  # Abstract: what JAX computes at once, it computes on this machine.
  with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
    compiled = compiled.build(planned)
  print(f"{TOPOLOGY.value}, mesh {data} x {model}, {devices[0].device_kind}")
  for name, room in compiled._asdict().items():
    if not hasattr(room, "memory_analysis"):
      continue
    used = room.memory_analysis()
    held = used.argument_size_in_bytes + used.output_size_in_bytes
    held -= used.alias_size_in_bytes
    print(
      f"{name:>9}: {held / 2**20:8,.1f} MiB held, "
      f"{used.temp_size_in_bytes / 2**20:8,.1f} MiB temporary"
    )


if __name__ == "__main__":
  app.run(main)
