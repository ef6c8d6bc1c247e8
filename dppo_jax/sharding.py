"""Where arrays live: one mesh, one table from logical axes to mesh axes.

The mesh has three axes. A replica holds all parameters: replicas are slices of
a pod, between which the network is slow, and meet once in a micro-batch, when
gradients are added up. Within a replica the data axis divides what is computed
on, and every weight by its width, which is gathered where it is used; the model
axis divides the weights for good: heads, experts, feed-forward parts and
vocabulary.
"""

import collections
from collections.abc import Callable, Iterator, Mapping, Sequence
import functools
import math

import jax
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
import numpy as np

from dppo_jax.errors import UserError

MESH_AXES = ("replica", "data", "model")
AXIS_TYPES = (AxisType.Auto,) * len(MESH_AXES)

# Logical axis -> mesh axes that divide it; none is replicated.
RULES: Mapping[str | None, tuple[str, ...]] = {
  "batch": ("replica", "data"),  # prompts, decode slots, packed rows
  "replica": ("replica",),  # likewise, but those of a replica stay together
  "embed": ("data",),  # a weight's input width
  "heads": ("model",),
  "kv_heads": ("model",),
  "mlp": ("model",),
  "expert": ("model",),
  "vocab": ("model",),
  "layer": (),
  "head_dim": (),
  None: (),
}


def make_mesh(
  data: int = 1,
  model: int = 1,
  replicas: int = 1,
  devices: Sequence[jax.Device] | None = None,
) -> Mesh:
  """A mesh of `replicas x data x model` devices.

  Args:
    data: -1 takes what the others leave.
    devices: to choose from; None is all that JAX finds.
  Raises:
    UserError: if there are fewer devices than the mesh needs.
  """
  devices = list(jax.devices() if devices is None else devices)
  shape = sizes(len(devices), data, model, replicas)
  return Mesh(
    _arrange(devices[: math.prod(shape)], shape),
    MESH_AXES,
    axis_types=AXIS_TYPES,
  )


def sizes(
  num_devices: int, data: int, model: int, replicas: int
) -> tuple[int, int, int]:
  """The axes of a mesh of so many devices; `data=-1` takes what is left.

  Raises:
    UserError: if there are fewer devices than the mesh needs.
  """
  if data == -1:
    data = max(1, num_devices // (model * replicas))
  shape = (replicas, data, model)
  size = math.prod(shape)
  if size > num_devices:
    named = shape if replicas > 1 else shape[1:]
    raise UserError(
      f"a mesh of {' x '.join(map(str, named))} needs {size} devices but "
      f"there are {num_devices}: lower config.mesh.data, config.mesh.model or "
      "config.mesh.replicas; a CPU stands for several devices where "
      f"JAX_NUM_CPU_DEVICES={size} is in the environment"
    )
  return shape


def _arrange(devices: list[jax.Device], shape: tuple[int, ...]) -> np.ndarray:
  """The devices in this shape, neighbours in it near each other.

  Slices, of a pod or of a cluster, divide replicas before they divide data, and
  never a model, as far as the numbers allow.
  """
  sizes = collections.Counter(getattr(x, "slice_index", 0) for x in devices)
  replicas, data, model = shape
  across = math.gcd(replicas, len(sizes))
  rest = len(sizes) // across
  options = {"allow_split_physical_axes": True}
  if len(sizes) == 1 or len(set(sizes.values())) > 1 or data % rest:
    return mesh_utils.create_device_mesh(shape, devices, **options)
  return mesh_utils.create_hybrid_device_mesh(
    (replicas // across, data // rest, model),
    (across, rest, 1),
    devices,
    **options,
  )


def describe(mesh: Mesh) -> str:
  """Its shape, such as `8 x 2`; replicas come first where there are any."""
  sizes = [mesh.shape[axis] for axis in MESH_AXES]
  return " x ".join(map(str, sizes if sizes[0] > 1 else sizes[1:]))


def num_shards(mesh: Mesh, axis: str) -> int:
  """Into how many parts `mesh` divides a logical axis."""
  return math.prod(mesh.shape[name] for name in RULES[axis])


def num_shards_here(axis: str) -> int:
  """Into how many parts the mesh that is set divides a logical axis.

  1 without a mesh. Axes that a shard_map around has divided do not count.
  """
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty:
    return 1
  names = set(RULES[axis]) - set(mesh.manual_axes)
  return math.prod(mesh.shape[name] for name in names)


def weight_sharding(
  mesh: Mesh, shape: Sequence[int], axes: Sequence[str | None]
) -> NamedSharding:
  """The sharding of a weight; one of too few `kv_heads` has all everywhere."""
  parts = lambda axis: num_shards(mesh, axis)
  return sharding(mesh, *_divisible(shape, axes, parts))


def constrain_weight(x: jax.Array, *axes: str | None) -> jax.Array:
  """As `constrain`, of a weight."""
  return constrain(x, *_divisible(x.shape, axes, num_shards_here))


def _divisible(
  shape: Sequence[int],
  axes: Sequence[str | None],
  parts: Callable[[str | None], int],
) -> Iterator[str | None]:
  """The axes, without that of kv_heads that are too few for its parts."""
  for size, axis in zip(shape, axes, strict=True):
    is_whole = axis == "kv_heads" and size % parts(axis)
    yield None if is_whole else axis


def num_kv_heads(kv_heads: int) -> int:
  """How many heads of keys and values are computed under the mesh that is set.

  Each is there so often that the mesh divides them evenly: a device has those
  that its query heads read, and no others.

  >>> from dppo_jax import sharding
  >>> sharding.num_kv_heads(2)  # without a mesh
  2
  """
  return math.lcm(kv_heads, num_shards_here("kv_heads"))


def spec(axes: tuple[str | None, ...]) -> PartitionSpec:
  """The partition of an array whose dimensions are these logical axes."""
  return _partition([RULES[axis] for axis in axes])


def sharding(mesh: Mesh, *axes: str | None) -> NamedSharding:
  """The sharding on `mesh` of an array with these logical axes."""
  return NamedSharding(mesh, spec(axes))


def unclaimed_spec(*axes: str | None) -> PartitionSpec:
  """The partition by those mesh axes that no shard_map around has divided.

  Inside a `jax.shard_map` over some axes of the mesh, those are manual and
  arrays are one shard of them already.
  """
  manual = jax.sharding.get_abstract_mesh().manual_axes
  return _partition(
    [[name for name in RULES[axis] if name not in manual] for axis in axes]
  )


def gather_width(x: jax.Array, *axes: str | None) -> jax.Array:
  """A weight, whole in its axis `embed`, inside a shard_map over the batch.

  Its other axes stay divided. To a collective over axes that are manual the
  compiler hands arrays that are whole in all others: hence all are manual here.
  """
  gather = functools.partial(
    jax.lax.all_gather,
    axis_name=RULES["embed"],
    axis=axes.index("embed"),
    tiled=True,
  )
  mesh = jax.sharding.get_abstract_mesh()
  if others := set(mesh.axis_names) - set(mesh.manual_axes):
    place = unclaimed_spec(*axes)
    gather = jax.shard_map(
      gather,
      in_specs=place,
      out_specs=place,
      axis_names=others,
      check_vma=False,
    )
  return gather(x)


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
  """`x`, laid out by its logical axes; as it is where no mesh is set."""
  if jax.sharding.get_abstract_mesh().empty:
    return x
  return jax.lax.with_sharding_constraint(x, unclaimed_spec(*axes))


def round_up(size: int, multiple: int) -> int:
  """Returns the smallest multiple of `multiple` that is at least `size`."""
  return -(-size // multiple) * multiple


def largest_divisor(size: int, limit: int) -> int:
  """Returns the largest divisor of `size` up to `limit`, at least 1."""
  return next(
    d for d in range(min(size, max(limit, 1)), 0, -1) if size % d == 0
  )


def _partition(dimensions: Sequence[Sequence[str]]) -> PartitionSpec:
  """Mesh axes of each dimension: a name, a tuple of several, or None."""
  return PartitionSpec(
    *(
      tuple(names) if len(names) > 1 else (names[0] if names else None)
      for names in dimensions
    )
  )
