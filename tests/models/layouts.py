"""Shardings of every weight of a model on a mesh, as a page of text.

  python tests/models/layouts.py    # rewrites the pages

A change of sharding is a change of these pages, for a reviewer to read.
"""

from collections.abc import Iterator
import math
import pathlib
from typing import Any

import jax
from jax.tree_util import keystr, tree_flatten_with_path

from dppo_jax import config, sharding
from dppo_jax.models import parameters
from dppo_jax.planning import assumed
from dppo_jax.step import abstract_values

GOLDEN = pathlib.Path(__file__).parent / "golden"

# Page -> the model, replicas, and devices of the data and the model axis.
PAGES = {
  "qwen3-4b": ("Qwen/Qwen3-4B", 1, 8, 2),
  "qwen3-30b-a3b": ("Qwen/Qwen3-30B-A3B", 2, 8, 8),
}


def page(name: str) -> str:
  """The text of a page."""
  hub_id, *axes = PAGES[name]
  c = config.Config()
  c.model.hub_id, c.model.dtype, c.data.eval = hub_id, "bfloat16", ""
  c.data.train, c.data.max_prompt_tokens, c.pack.row_length = "-", 64, 128
  c.mesh.replicas, c.mesh.data, c.mesh.model = axes
  c.data.prompts_per_step = math.prod(axes)
  mesh = assumed.abstract_mesh(c.mesh, math.prod(axes))
  run = assumed.assumed_run(c, mesh, "tpu")
  with jax.sharding.use_abstract_mesh(mesh):
    state = abstract_values.abstract_train_state(run.spec)
    copy = abstract_values.abstract_inference_params(run.spec)
  first = {**copy, "layers": copy["layers"][0]}
  groups = len(copy["layers"])
  declared = {
    name: " ".join(axis or "-" for axis in p.axes)
    for name, p in parameters.parameter_table(run.spec.model).items()
  }
  about = f"{hub_id} on {' x '.join(map(str, axes))} devices"
  lines = [
    f"{about} ({', '.join(sharding.MESH_AXES)})",
    *("", "What the axes of a weight are divided by", ""),
    *(f"{axis or '-':9}{_names(by)}" for axis, by in sharding.RULES.items()),
    *("", "Master weights", ""),
    *_table(state.params, declared),
    *("", "Optimizer", ""),
    *_table(state.opt_state, declared),
    *("", f"The rollout's copy: of {groups} groups of layers the first", ""),
    *_table(first, declared),
    f"MiB a device in all: {_mebibytes(jax.tree.leaves(copy)):,.2f}",
  ]
  return "\n".join(line.rstrip() for line in lines) + "\n"


def _table(tree: Any, declared: dict[str, str]) -> Iterator[str]:
  """A line for each array, and one for all together."""
  yield _line("name", "type", "shape", "axes", "divided by", "MiB a device")
  leaves, _ = tree_flatten_with_path(tree)
  for path, x in leaves:
    name = keystr(path, simple=True, separator="/")
    axes = next((v for k, v in declared.items() if name.endswith(k)), "")
    places = [x.sharding.spec[i] for i in range(len(x.sharding.spec))]
    yield _line(
      name,
      str(x.dtype),
      " x ".join(map(str, x.shape)),
      axes,
      " ".join(_names(place) for place in places),
      f"{_mebibytes([x]):,.2f}",
    )
  total = _mebibytes([x for _, x in leaves])
  yield _line("in all", "", "", "", "", f"{total:,.2f}")


def _line(name, dtype, shape, axes, spec, size) -> str:
  start = f"{name:42} {dtype:9} {shape:23} {axes:26} {spec:20}"
  return f"{start}{size:>12}"


def _names(place: Any) -> str:
  """Mesh axes; `-` for none."""
  return place if isinstance(place, str) else "+".join(place or ()) or "-"


def _mebibytes(arrays: list[jax.ShapeDtypeStruct]) -> float:
  """Returns the size of these arrays on one device."""
  size = lambda x: math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
  return sum(map(size, arrays)) / 2**20


if __name__ == "__main__":
  for name in PAGES:
    (GOLDEN / f"{name}.txt").write_text(page(name), "utf-8")
