"""Runs `dppo_jax.main` with options that only shorten it.

`tests.page_commands` puts this in the place of `python -m dppo_jax.main`.
"""

import os
import pathlib
import re
import runpy
import sys

from dppo_jax.config import cli
from dppo_jax.errors import UserError
from dppo_jax.run import checkpoint_steps

STEPS, PROBLEMS, SAMPLES = 2, 8, 4
SLOTS = 8  # few have fewer stages of decoding to compile


def shorten(words: list[str]) -> list[str]:
  """Returns the words of a command with fewer steps, problems and samples.

  A run trains `STEPS` further steps at each call. Its directory keeps the name
  of the unshortened run; a step that no shortened run has is replaced by the
  latest.
  """
  words = [re.sub(r"^(--step)=\d+$", "--step=latest", x) for x in words]
  words = [x for x in words if x != "--step=latest"]
  config, workdir, flags = cli.parse(["main", *words])
  more = {}
  if flags.mode not in ("train", "evaluate"):
    return words
  if not 0 < config.data.eval_limit <= PROBLEMS:
    more["data.eval_limit"] = PROBLEMS
  if config.eval.samples > SAMPLES:
    more["eval.samples"] = SAMPLES
  if not 0 < config.rollout.num_slots <= SLOTS:
    more["rollout.num_slots"] = SLOTS
  if flags.mode == "train":
    latest = max(checkpoint_steps.complete_steps(workdir), default=0)
    more["steps"] = min(config.steps, latest + STEPS)
    more["data.prompts_per_step"] = min(config.data.prompts_per_step, PROBLEMS)
    if config.sft.needs_solutions:
      more["sft.steps"] = min(config.sft.steps, STEPS)
    if config.sft.from_run:
      run = pathlib.Path(re.sub(r"@\d+$", "", config.sft.from_run))
      steps = checkpoint_steps.complete_steps(run)
      more["sft.from_run"] = f"{run}@{max(steps, default=0)}"
    words = [*words, f"--workdir={workdir}"]
  return [*words, *(f"--config.{name}={x}" for name, x in more.items())]


if __name__ == "__main__":
  given = sys.argv[1:]
  try:
    sys.argv[1:] = shorten(given)
  except UserError:
    pass  # the command itself says what is wrong
  if sys.argv[1:] != given:
    with open(os.environ["SHORTENED"], "a", encoding="utf-8") as log:
      log.write(" ".join(given) + "\n")
  runpy.run_module("dppo_jax.main", run_name="__main__", alter_sys=True)
