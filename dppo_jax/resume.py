"""What a run that goes on may change, and what it may not."""

import json
import os
import pathlib

from dppo_jax import config as configs

# What a resumed run may change: none of it alters a step's result by more than
# rounding.
FREE = (
  "steps",
  "model.remat",
  "model.attention",
  "rollout.num_slots",
  "rollout.prefill_prompts",
  "pack.rows",
  "pack.window",
  "pack.shares_prompts",
  "pack.head_tokens",
  "reward.num_workers",
  "reward.timeout_seconds",
  "eval.every",
  "checkpoint.every",
  "checkpoint.keep",
  "mesh.data",
  "mesh.model",
)


def has_schedule(config: configs.Config) -> bool:
  """True where what the method prunes depends on the number of steps."""
  args = config.method.args
  return args.get("steps") == 0 and args.get("prune_until", 0) != 1


def write(path: pathlib.Path, config: configs.Config) -> None:
  """Writes the config, or refuses where a run under another has begun.

  Raises:
    ValueError: where the run in that directory cannot go on under `config`;
      it names every field that differs.
  """
  new = configs.flatten(config)
  # Without a checkpoint there is nothing to go on from.
  if path.exists() and any(
    x.name.isdigit() for x in path.parent.glob("checkpoints/*")
  ):
    old = json.loads(path.read_text())
    free = set(FREE)
    if new["optimizer.schedule"] != "constant" or has_schedule(config):
      free.discard("steps")  # the learning rate, or pruning, depends on it
    if configs.make_method(config).tokens:
      free -= {"pack.rows", "pack.window"}  # tokens are drawn along the rows
    differing = [
      f"config.{name} was {old.get(name)!r} and is now {new.get(name)!r}"
      for name in sorted(old.keys() | new.keys())
      if old.get(name) != new.get(name) and name not in free
    ]
    if differing:
      raise ValueError(
        f"{path.parent} holds a run of another config; choose another "
        f"--workdir, or restore: {'; '.join(differing)}"
      )
  path.parent.mkdir(parents=True, exist_ok=True)
  whole = path.with_suffix(".tmp")
  whole.write_text(json.dumps(new, indent=2) + "\n")
  os.replace(whole, path)
