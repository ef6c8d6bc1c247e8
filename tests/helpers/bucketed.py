"""Logs and checkpoints of a run in `gs://bucket`, without a model."""

import json
import pathlib

import chex
import fsspec
import jax.numpy as jnp

from dppo_jax.files import bucket, storage
from dppo_jax.records import TrainState
from dppo_jax.run import checkpoint, checkpoint_steps


def go(url: str) -> pathlib.Path:
  """Returns the directory of a run on another machine."""
  bucket._urls.clear()
  return bucket.workdir(url)


def state(step):
  weights = {"w": jnp.arange(64.0).reshape(8, 8) + step}
  moments = {"m": jnp.full((8, 8), float(step))}
  return TrainState(jnp.int32(step), jnp.int32(step), weights, moments, ())


def log(workdir: pathlib.Path, step: int) -> None:
  workdir.mkdir(exist_ok=True)
  with (workdir / "metrics.jsonl").open("a") as file:
    file.write(f'{{"step": {step}}}\n')


def train(
  workdir: pathlib.Path, *steps: int, keep: int = 1, best: str = ""
) -> list[str]:
  """Logs and saves steps as a run does; returns its warnings."""
  with bucket.claimed(workdir):
    with checkpoint.Checkpoints(workdir, keep, best) as checkpoints:
      warnings = checkpoints.recover()
      for step in steps:
        log(workdir, step)
        checkpoints.is_best(step, {"score": step if step < 5 else -step})
        bucket.send(workdir)
        checkpoints.save(step, state(step))
  return warnings


def check(url: str, *steps: int) -> None:
  """Raises unless exactly these steps can be restored on another machine."""
  workdir = go(url)
  assert checkpoint_steps.complete_steps(workdir) == list(steps)
  with checkpoint.Checkpoints(workdir, read_only=True) as checkpoints:
    for step in steps:
      assert not checkpoints.corruption(step)
      restored = checkpoints.restore(step, state(0))
      chex.assert_trees_all_equal(restored, state(step))
  text = fsspec.filesystem("gs").cat(f"{url}/metrics.jsonl").decode()
  logged = [json.loads(line)["step"] for line in text.splitlines()]
  assert {*steps} <= {*logged}


def objects(url: str) -> dict[str, storage.Stored]:
  return storage.files(url)


def delete(url: str, pattern: str = "") -> None:
  for name in objects(url):
    if pattern in name:
      fsspec.filesystem("gs").rm_file(f"{url}/{name}")


def damage(url: str, name: str) -> None:
  files, path = fsspec.filesystem("gs"), f"{url}/checkpoints/{name}"
  content = bytearray(files.cat(path))
  content[len(content) // 2] ^= 1
  files.pipe(path, bytes(content))
