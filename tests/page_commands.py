"""Runs every block of commands and code of the pages, in fresh clones.

  python -m tests.page_commands [PAGE ...]
  python -m tests.page_commands --here README.md

All pages but the README, unless some are named.

The blocks of a page run in their order, as they are written, in a clone of the
repository that has what its reader has: a checkpoint `DIR`, data files, runs,
and the hub's models and data sets in its cache. Commands that train or evaluate
are shortened (`tests/helpers/shortened.py`). With `--here` they run in this
directory, which has the first run of the README, and those that take less than
three minutes are not shortened.

Prints a line for each block; exits with 1 if one fails.
"""

import argparse
from concurrent import futures
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time

from tests.helpers import commands, hub_cache, pages, sources, xla_flags

# Commands that are not run, and why.
_CLOUD = "needs a cloud"  # and so does all of its block
NOT_RUN = (
  (r"pip install|-m venv", "installs packages: .ci/run runs those of README"),
  (r"-m pytest", "the test suite, which .ci/run runs"),
  (r"gcloud|kubectl|xpk|sky |gsutil|sbatch|srun|ssh|gs://", _CLOUD),
  (r"--push=", "needs an account of the hub"),
  (r"wandb", "needs an account of wandb"),
  (r"--topology=", "needs libtpu or the CUDA plugin"),
  (r"05_accelerator", "needs an accelerator"),
  (r"-m experiments\.|15_real_model/fetch", "hours; tests run small ones"),
  (r"notebooks/refresh", "the notebooks, which tests run"),
  (r"experiments/launch/|--coordinator=", "needs a cluster; see localhost.py"),
  (r"reward_model\.py", "needs a reward model of the hub"),
  (r"git checkout", "the code of a closed experiment"),
)
RUN = "runs/arithmetic-neyman-seed0"
COPIES = ("a-0", "a-1", "b-0", "b-1", "grpo-0", "grpo-1", "dppo-0", "dppo-1")
LONG = ("smollm2",)  # takes longer than three minutes


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("pages", nargs="*", type=pathlib.Path)
  parser.add_argument("--here", action="store_true")
  args = parser.parse_args()
  chosen = [x.resolve() for x in args.pages] or [
    x for x in pages.pages() if _blocks(x) and x.parent != commands.ROOT
  ]
  with tempfile.TemporaryDirectory() as folder:
    home = pathlib.Path(folder)
    hub_cache.write(home / "hub")
    if args.here:
      failures = [_run_page(x, commands.ROOT, home, LONG) for x in chosen]
    else:
      base = _clone(home / "base")
      _supply(base, home)
      chosen.sort(key=lambda page: -len(page.read_text().split("```")))
      with futures.ThreadPoolExecutor(3) as pool:
        failures = [*pool.map(lambda x: _run_copy(x, base, home), chosen)]
  sys.exit(int(any(failures)))


def _blocks(page: pathlib.Path) -> list[tuple[str, str]]:
  """Returns the language and text of each block, in order."""
  return [*pages.labelled_blocks(page, "sh", "bash", "python")]


def _clone(folder: pathlib.Path) -> pathlib.Path:
  """Copies what a clone would have, changes that are not committed included."""
  listed = subprocess.run(
    ["git", "ls-files", "-co", "--exclude-standard", "-z"],
    cwd=commands.ROOT,
    check=True,
    capture_output=True,
    text=True,
  )
  for name in filter(None, listed.stdout.split("\0")):
    if (commands.ROOT / name).is_file():
      (folder / name).parent.mkdir(parents=True, exist_ok=True)
      shutil.copyfile(commands.ROOT / name, folder / name)
  return folder


def _supply(clone: pathlib.Path, home: pathlib.Path) -> None:
  """Adds what the readers of pages have: a run, a checkpoint and data."""
  hub_cache.write_checkpoint(clone / "DIR")
  rows = [
    dict(problem=f"{i}+1=", question=f"{i}+1=", answer=str(i + 1), context="")
    for i in range(hub_cache.NUM_ROWS)
  ]
  for name in ("train", "test", "math_train", "m500", "aime", "olympiadbench"):
    sources.write_jsonl(clone / f"{name}.jsonl", rows)
  first = "python -m dppo_jax.main --config=configs/arithmetic.py"
  done, _ = _bash(first, clone, home)
  if done.returncode:
    sys.exit(done.stdout)
  config = json.loads((clone / RUN / "config.json").read_text())
  for name in COPIES:
    copy, (method, seed) = clone / "runs" / name, name.split("-")
    copy.mkdir()
    shutil.copyfile(clone / RUN / "metrics.jsonl", copy / "metrics.jsonl")
    change = {"method.name": method, "seed": int(seed)}
    (copy / "config.json").write_text(json.dumps(config | change))


def _run_copy(
  page: pathlib.Path, base: pathlib.Path, home: pathlib.Path
) -> bool:
  with tempfile.TemporaryDirectory(dir=home) as folder:
    clone = pathlib.Path(folder, "clone")
    shutil.copytree(base, clone, symlinks=True)
    return _run_page(page, clone, home)


def _run_page(
  page: pathlib.Path,
  clone: pathlib.Path,
  home: pathlib.Path,
  to_shorten: tuple[str, ...] = ("",),
) -> bool:
  """Runs the blocks of a page in turn; returns True if one fails.

  Args:
    to_shorten: texts in blocks that are shortened.
  """
  for name, text in pages.files(page).items():
    (clone / name).write_text(text)
  lines, has_failed = [], False
  for number, (language, text) in enumerate(_blocks(page), 1):
    name = f"{page.relative_to(commands.ROOT)} {number} ({language})"
    reasons = {}
    if language == "python":
      block = home / f"{page.parent.name}-{number}.py"
      block.write_text(text)
      command = f"python {block}"
    else:
      command, reasons = _without_skipped(text)
    results = [f"not run: {x}" for x in reasons]
    if command.strip():
      start = time.monotonic()
      is_short = any(x in text for x in to_shorten)
      done, was_short = _bash(command, clone, home, is_short)
      seconds = f"{time.monotonic() - start:.0f} s"
      has_failed = done.returncode != 0
      result = "shortened" if was_short else "as written"
      results.insert(0, f"{'FAILED' if has_failed else result}, {seconds}")
    lines.append(f"{name}: {'; '.join(results)}")
    if has_failed:  # later blocks may depend on it
      lines += [text, *done.stdout.splitlines()[-20:]]
      break
  print("\n".join(lines), flush=True)
  return has_failed


def _without_skipped(block: str) -> tuple[str, dict[str, None]]:
  """Returns a block without the commands that are not run, and the reasons."""
  kept, reasons = [], {}
  for command in re.split(r"(?<!\\)\n", block):
    matches = (why for what, why in NOT_RUN if re.search(what, command))
    reason = next(matches, "") if not command.startswith("#") else ""
    if reason:
      reasons[reason] = None
    else:
      kept.append(command)
  is_run = any(x.strip() and not x.startswith("#") for x in kept)
  is_run &= _CLOUD not in reasons
  return "\n".join(kept) if is_run else "", reasons


def _bash(
  text: str, clone: pathlib.Path, home: pathlib.Path, is_short: bool = True
) -> tuple[subprocess.CompletedProcess, bool]:
  """Runs commands in a clone; also returns whether one was shortened."""
  with tempfile.TemporaryDirectory(dir=home) as folder:
    log, python = pathlib.Path(folder, "log"), pathlib.Path(folder, "python")
    python.write_text(
      f"""#!/bin/bash
if [[ "{is_short} $1 $2" == "True -m dppo_jax.main" ]]; then
  exec {sys.executable} -m tests.helpers.shortened "${{@:3}}"
fi
exec {sys.executable} "$@"
"""
    )
    python.chmod(0o755)
    environment = {
      "HF_HOME": str(home / "hub"),
      "HF_HUB_OFFLINE": "1",
      "JAX_PLATFORMS": "cpu",
      "MPLBACKEND": "agg",
      "PATH": f"{folder}:{os.environ['PATH']}",
      "PYTHONPATH": str(clone),
      "SHORTENED": str(log),
    }
    if is_short:  # compiles faster, computes slower
      environment["XLA_FLAGS"] = " ".join(xla_flags.known_flags())
    done = subprocess.run(
      ["bash", "-euo", "pipefail", "-c", text],
      cwd=clone,
      env=os.environ | environment,
      stdin=subprocess.DEVNULL,
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      check=False,
      text=True,
    )
    return done, log.exists()


if __name__ == "__main__":
  main()
