"""Where arrays live: one mesh, one table from logical axes to mesh axes."""

from collections.abc import Mapping, Sequence

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

MESH_AXES = ("data", "model")

# Logical axis -> mesh axis; None is replicated.
RULES: Mapping[str | None, str | None] = {
  "batch": "data",  # prompts, decode slots, packed rows
  "embed": "data",  # a weight's input width: gathered where it is used
  "heads": "model",
  "kv_heads": "model",
  "mlp": "model",
  "expert": "model",
  "vocab": "model",
  "layer": None,
  "head_dim": None,
  None: None,
}


def make_mesh(
  data: int = 1, model: int = 1, devices: Sequence[jax.Device] | None = None
) -> Mesh:
  """A mesh of `data x model` devices; `data=-1` takes what `model` leaves.

  Args:
    devices: to choose from; None are those that there are.
  Raises:
    ValueError: where there are fewer devices than the mesh needs.
  """
  devices = jax.devices() if devices is None else devices
  if data == -1:
    data = max(1, len(devices) // model)
  if data * model > len(devices):
    raise ValueError(
      f"a mesh of {data} x {model} needs {data * model} devices but there "
      f"are {len(devices)}: lower config.mesh.data or config.mesh.model"
    )
  return jax.make_mesh(
    (data, model),
    MESH_AXES,
    axis_types=(AxisType.Auto, AxisType.Auto),
    devices=devices[: data * model],
  )


def spec(axes: tuple[str | None, ...]) -> PartitionSpec:
  """The partition of an array whose dimensions are these logical axes."""
  return PartitionSpec(*(RULES[axis] for axis in axes))


def sharding(mesh: Mesh, *axes: str | None) -> NamedSharding:
  """The sharding on `mesh` of an array with these logical axes."""
  return NamedSharding(mesh, spec(axes))


def unclaimed_spec(*axes: str | None) -> PartitionSpec:
  """The partition by those mesh axes that no shard_map around has divided.

  Inside a `jax.shard_map` over some axes of the mesh, those are manual and
  arrays are one shard of them already.
  """
  manual = jax.sharding.get_abstract_mesh().manual_axes
  return PartitionSpec(
    *(None if axis in manual else axis for axis in spec(axes))
  )


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
  """`x`, laid out by its logical axes; as it is where no mesh is set."""
  if jax.sharding.get_abstract_mesh().empty:
    return x
  return jax.lax.with_sharding_constraint(x, unclaimed_spec(*axes))
