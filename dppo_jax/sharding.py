"""The device mesh, and one table from logical axes to mesh axes.

Replicas each hold all parameters and exchange only gradients, once in a
micro-batch, since the network between them (slices of a pod) is slow. Within a
replica, the data axis divides the batch, and every weight by its width, which
is gathered where it is used. The model axis divides heads, experts,
feed-forward parts and vocabulary.
"""

import collections
from collections.abc import Mapping, Sequence
import functools
import math

import jax
from jax.experimental import mesh_utils
from jax.sharding import (
  AbstractMesh,
  AxisType,
  Mesh,
  NamedSharding,
  PartitionSpec,
)
import numpy as np

from dppo_jax.errors import UserError

MESH_AXES = ("replica", "data", "model")
AXIS_TYPES = (AxisType.Auto,) * len(MESH_AXES)

AnyMesh = Mesh | AbstractMesh  # the latter for shapes without devices

# Logical axis -> mesh axes that divide it; without any, it is replicated.
RULES: Mapping[str | None, tuple[str, ...]] = {
  "batch": ("replica", "data"),  # prompts, decode slots, packed rows
  "replica": ("replica",),  # batches that stay together in a replica
  "embed": ("data",),  # a weight's input width
  "heads": ("model",),
  "kv_heads": ("model",),
  "mlp": ("model",),
  "expert": ("model",),
  "vocab": ("model",),
  "layer": (),
  None: (),
}


def make_mesh(
  data: int = 1,
  model: int = 1,
  replicas: int = 1,
  devices: Sequence[jax.Device] | None = None,
) -> Mesh:
  """Returns a mesh of `replicas x data x model` devices.

  Args:
    data: size of the data axis; -1 for all devices that the others leave.
    devices: devices to choose from; None for all.
  """
  devices = list(jax.devices() if devices is None else devices)
  shape = sizes(len(devices), data, model, replicas)
  grid = _arrange(devices[: math.prod(shape)], shape)
  return Mesh(grid, MESH_AXES, axis_types=AXIS_TYPES)


def sizes(
  num_devices: int, data: int, model: int, replicas: int
) -> tuple[int, int, int]:
  """Returns the axes of a mesh of `num_devices`; see `make_mesh`."""
  if data == -1:
    data = max(1, num_devices // (model * replicas))
  shape = (replicas, data, model)
  size = math.prod(shape)
  if size > num_devices:
    raise UserError(
      f"a mesh of {replicas} x {data} x {model} needs {size} devices but there "
      f"are {num_devices}: lower config.mesh.data, config.mesh.model or "
      "config.mesh.replicas; or name more devices in a plan, or let a CPU act "
      f"as several with JAX_NUM_CPU_DEVICES={size} in the environment"
    )
  return shape


def _arrange(devices: list[jax.Device], shape: tuple[int, ...]) -> np.ndarray:
  """Arranges devices in this shape, with neighbours close to each other.

  If possible, slices of a pod or a cluster divide replicas, then data, and
  never a model.
  """
  sizes = collections.Counter(getattr(x, "slice_index", 0) for x in devices)
  replicas, data, model = shape
  across = math.gcd(replicas, len(sizes))
  within = len(sizes) // across
  options = {"allow_split_physical_axes": True}
  if len(sizes) == 1 or len(set(sizes.values())) > 1 or data % within:
    return mesh_utils.create_device_mesh(shape, devices, **options)
  on_slice, of_slices = (replicas // across, data // within), (across, within)
  return mesh_utils.create_hybrid_device_mesh(
    (*on_slice, model), (*of_slices, 1), devices, **options
  )


def describe(mesh: AnyMesh) -> str:
  """Returns the shape of a mesh, such as `8 x 2`."""
  sizes = [mesh.shape[axis] for axis in MESH_AXES]
  return " x ".join(map(str, sizes if sizes[0] > 1 else sizes[1:]))


def num_shards(mesh: AnyMesh, axis: str | None) -> int:
  """Returns the number of parts into which `mesh` divides a logical axis."""
  return math.prod(mesh.shape[name] for name in RULES[axis])


def num_shards_here(axis: str) -> int:
  """Returns the parts of the current mesh, inside any enclosing shard_map."""
  shape = jax.sharding.get_abstract_mesh().shape
  return math.prod(shape[name] for name in free_axes() & {*RULES[axis]})


def free_axes() -> set[str]:
  """Returns the mesh axes that no enclosing shard_map divides."""
  mesh = jax.sharding.get_abstract_mesh()
  return set(mesh.axis_names) - set(mesh.manual_axes)


def num_kv_heads(kv_heads: int) -> int:
  """Returns the heads of keys and values, repeated to divide evenly."""
  return math.lcm(kv_heads, num_shards_here("kv_heads"))


def spec(axes: tuple[str | None, ...]) -> PartitionSpec:
  """Returns the partition of an array with these logical axes."""
  return PartitionSpec(*(RULES[axis] for axis in axes))


def sharding(mesh: AnyMesh, *axes: str | None) -> NamedSharding:
  """Returns the sharding on `mesh` of an array with these logical axes."""
  return NamedSharding(mesh, spec(axes))


def unclaimed_spec(*axes: str | None) -> PartitionSpec:
  """Returns the partition by mesh axes that no enclosing shard_map divides."""
  manual = jax.sharding.get_abstract_mesh().manual_axes
  free = lambda axis: tuple(x for x in RULES[axis] if x not in manual)
  return PartitionSpec(*map(free, axes))


def gather_width(x: jax.Array, *axes: str | None) -> jax.Array:
  """Gathers a weight's axis `embed`, inside a shard_map over the batch.

  Its other axes stay divided: for a collective over manual axes the compiler
  would gather them too, so all axes become manual here.
  """
  gather = functools.partial(
    jax.lax.all_gather,
    axis_name=RULES["embed"],
    axis=axes.index("embed"),
    tiled=True,
  )
  if free := free_axes():
    place = unclaimed_spec(*axes)
    gather = jax.shard_map(
      gather, in_specs=place, out_specs=place, axis_names=free, check_vma=False
    )
  return gather(x)


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
  """Lays out `x` by its logical axes, if a mesh is set."""
  if jax.sharding.get_abstract_mesh().empty:
    return x
  return jax.lax.with_sharding_constraint(x, unclaimed_spec(*axes))


def round_up(size: int, multiple: int) -> int:
  """Returns the smallest multiple of `multiple` that is at least `size`."""
  return -(-size // multiple) * multiple


def largest_divisor(size: int, limit: int) -> int:
  """Returns the largest divisor of `size` up to `limit`, at least 1."""
  limit = min(size, max(limit, 1))
  return next(d for d in range(limit, 0, -1) if size % d == 0)
