"""Weights of a run's checkpoint, for modes that do not train."""

import pathlib

import jax
from jaxtyping import PyTree
import orbax.checkpoint as ocp

from dppo_jax.errors import UserError
from dppo_jax.run import checkpoint


def restore(
  workdir: pathlib.Path, step: int | None, like: PyTree
) -> tuple[int, PyTree, list[str]]:
  """Restores the weights of a checkpoint.

  Args:
    step: checkpoint step; None for the latest that is intact.
    like: arrays, possibly abstract, with the expected shapes and placements.
  Returns:
    The step, its weights, and a warning for each damaged checkpoint that was
    skipped.
  """
  if not (workdir / "checkpoints").is_dir():
    raise UserError(f"{workdir} has no checkpoints: set --workdir")
  with checkpoint.Checkpoints(workdir, read_only=True) as checkpoints:
    step = checkpoints.find(step)
    checkpoints.check(step, ("params",))
    _check_shapes(workdir, step, like)
    params = checkpoints.restore_params(step, like)
    return step, params, checkpoints.skipped


def _check_shapes(workdir: pathlib.Path, step: int, like: PyTree) -> None:
  """Raises UserError unless the checkpoint has weights of these shapes."""

  def shapes(tree: PyTree) -> dict[str, tuple[int, ...]]:
    leaves, _ = jax.tree.flatten_with_path(tree)
    name = lambda path: jax.tree_util.keystr(path, simple=True, separator=".")
    return {name(path): tuple(x.shape) for path, x in leaves}

  folder = workdir.absolute() / f"checkpoints/{step}/params"
  stored = ocp.StandardCheckpointer().metadata(folder).item_metadata.tree
  stored, expected = shapes(stored), shapes(like)
  for name in sorted(stored.keys() | expected.keys()):
    if stored.get(name) != expected.get(name):
      raise UserError(
        f"step {step} of {workdir} holds another model: {name} has shape "
        f"{stored.get(name)} there but {expected.get(name)} in the config; "
        "omit --config to use the config of the run"
      )
