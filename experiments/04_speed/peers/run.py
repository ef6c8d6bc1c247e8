"""Times the same GRPO steps in TRL, in tunix and here, on the same cores.

  python -m experiments.04_speed.peers.run [--cores=0] [--steps=4] [--repeats=3]

Each system first scores fixed sequences: if two of them differ in a
log-probability or in the gradient's norm, nothing is timed. Every measurement
is a process of its own. Results go to results-N.jsonl and table-N.csv in this
folder, N being the number of cores.
"""

import argparse
from collections.abc import Callable, Iterable
import json
import pathlib
import platform
import statistics
import subprocess
import sys
import time

import numpy as np

from dppo_jax.analysis import tables

from ...common import processes, results
from ...common.results import median_range
from . import clock, work

HERE = pathlib.Path(__file__).parent
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
PEERS = {
  "trl": ("torch==2.13.0", "trl==1.16.0", "transformers==5.23.0"),
  "tunix": ("google-tunix==0.1.7", "jax==0.10.2", "flax==0.12.8"),
}
OURS = ("grpo", "dppo")
# Sizes of a micro-batch to choose from: sequences; here rows x tokens a device.
MICRO = {
  "trl": ("8", "32", "64"),
  "tunix": ("8", "32", "64"),
  "grpo": ("1x448", "2x448", "1x896"),
  "dppo": ("1x448", "2x448", "1x896"),
}
SYSTEMS = (*PEERS, "grpo")  # that check and decode; dppo does it as grpo
LOGPROB, NORM = 1e-3, 1e-3  # largest difference in nats; relative
THREADS = ("OMP", "MKL", "OPENBLAS", "NUMEXPR")
EPOCHS = 2  # of which the first is not counted


class Bench:
  """Starts the systems' programs.

  Attributes:
    root: where the work and what the programs leave are kept.
    envs: directory of the peers' virtual environments.
    cores: those that every measured process may use.
  """

  def __init__(self, root: pathlib.Path, envs: pathlib.Path, cores: list[int]):
    self.root, self.envs, self.cores = root, envs, cores
    self.work = root / "work"

  def python(self, system: str) -> str:
    if system in OURS:
      return sys.executable
    return str(self.envs / system / "bin" / "python")

  def prepare(self, num_steps: int, seeds: Iterable[int]) -> None:
    """The environments and the work, where they are missing."""
    for peer, needs in PEERS.items():
      if pathlib.Path(self.python(peer)).exists():
        continue
      install = [self.python(peer), "-m", "pip", "install", "--quiet"]
      make = [sys.executable, "-m", "venv", str(self.envs / peer)]
      subprocess.run(make, check=True)
      if peer == "trl":  # its torch comes first, without CUDA
        torch = ["--no-deps", "--extra-index-url", TORCH_INDEX, needs[0]]
        subprocess.run([*install, *torch], check=True)
      subprocess.run([*install, *needs], check=True)
    write = [self.python("trl"), "-m", f"{__package__}.work", str(self.work)]
    self._run([*write, f"--steps={num_steps}"], self.root / "work.log", {})
    for seed in seeds:
      out = self.work / f"order-{seed}.json"
      total = EPOCHS * num_steps
      self.call("grpo", "order", MICRO["grpo"][0], out, total, seed)

  def versions(self) -> dict[str, str]:
    """Returns the installed versions of everything compared."""
    out = {}
    for system, needs in (PEERS | {"grpo": ("jax==",)}).items():
      freeze = [self.python(system), "-m", "pip", "freeze"]
      frozen = subprocess.run(
        freeze, check=True, capture_output=True, text=True
      )
      names = [need.partition("==")[0] for need in needs]
      lines = [line.partition("==") for line in frozen.stdout.split()]
      out |= {f"{system}/{x}": y for x, _, y in lines if x in names}
    return out

  def call(
    self,
    system: str,
    mode: str,
    micro: str,
    out: pathlib.Path,
    num_steps: int = 1,
    seed: int = 0,
    keeps: bool = False,
  ) -> None:
    """Runs one system's program, which writes `out`.

    Args:
      keeps: takes and leaves compiled programs in a directory, if it is JAX.
    """
    program = "ours" if system in OURS else system
    arguments = [
      *(self.python(system), "-m", f"{__package__}.with_{program}"),
      mode,
      f"--work={self.work}",
      f"--out={out}",
      f"--micro={micro}",
      f"--steps={num_steps}",
      f"--seed={seed}",
    ]
    if system in OURS:
      arguments.append(f"--method={system}")
    out.parent.mkdir(parents=True, exist_ok=True)
    devices = len(self.cores) if system in OURS else 1
    env = {
      "JAX_ENABLE_COMPILATION_CACHE": str(keeps).lower(),
      "JAX_NUM_CPU_DEVICES": str(devices),
    }
    self._run(arguments, out.with_suffix(".log"), env)

  def _run(
    self, arguments: list[str], log: pathlib.Path, env: dict[str, str]
  ) -> None:
    env = env | {
      **{f"{name}_NUM_THREADS": str(len(self.cores)) for name in THREADS},
      "JAX_COMPILATION_CACHE_DIR": str(self.root / "programs"),
      "JAX_PLATFORMS": "cpu",
      "HF_HUB_OFFLINE": "1",
      "TOKENIZERS_PARALLELISM": "false",
      clock.STARTED: str(time.monotonic()),
    }
    try:
      processes.execute(arguments, self.cores, log, env)
    except subprocess.CalledProcessError:
      sys.exit(f"{' '.join(arguments)} failed: see {log}")


def check(bench: Bench, micro: dict[str, str]) -> dict[str, float]:
  """Compares what the systems make of the same sequences.

  Returns:
    The largest difference of a log-probability, in nats, and of the norm,
    relative.
  """
  results_of = []
  for system in SYSTEMS:
    out = bench.root / "check" / f"{system}.json"
    bench.call(system, "check", micro[system], out)
    results_of.append(json.loads(out.read_text()))
  wanted = work.sequences(bench.work)
  prompts = wanted["prompts"][:: work.GROUP]
  if any(x["prompt_ids"] != prompts for x in results_of):
    sys.exit("the systems' tokenizers differ: nothing was timed")
  is_token = np.array(work.padded(wanted["completions"], work.NEW)) != work.PAD
  logprobs = np.array([np.array(x["logprobs"])[is_token] for x in results_of])
  norms = np.array([x["norm"] for x in results_of])
  worst = {
    "logprob": float((logprobs.max(axis=0) - logprobs.min(axis=0)).max()),
    "norm": float(norms.max() / norms.min() - 1),
  }
  print(f"gradient norms {norms}, largest differences {worst}", flush=True)
  # A NaN is below no limit.
  if not (worst["logprob"] <= LOGPROB and worst["norm"] <= NORM):
    sys.exit("the systems do not do the same work: nothing was timed")
  return worst


def measure(
  bench: Bench,
  system: str,
  micro: str,
  num_steps: int,
  seed: int,
  name: str,
  skips: int = 1,
) -> dict:
  """One run; what its steps took, of which the first `skips` do not count."""
  out = bench.root / name / f"{system}-{micro}-{seed}.jsonl"
  bench.call(system, "steps", micro, out, num_steps, seed, name == "kept")
  lines = [json.loads(line) for line in out.read_text().splitlines()]
  assert len(lines) == num_steps, out
  run = {
    "name": name,
    "system": system,
    "micro": micro,
    "seed": seed,
    "skips": skips,
    "steps": lines,
  }
  print(
    f"{name} {seed}, {system} {micro}: {per_step(run, 'seconds'):.2f} s a step,"
    f" {per_step(run, 'generated'):.0f} tokens generated",
    flush=True,
  )
  return run


def later(run: dict, key: str) -> list[float]:
  """A number of each step that counts."""
  return [line[key] for line in run["steps"][run["skips"] :]]


def per_step(run: dict, key: str) -> float:
  return statistics.mean(later(run, key))


def per_token(run: dict, key: str) -> float:
  """For every 1,000 tokens generated."""
  return 1000 * sum(later(run, key)) / sum(later(run, "generated"))


def paired(
  runs: list[dict], peer: str, base: str, value: Callable[[dict], float]
) -> list[float]:
  """The peer's value by the base's, repetition by repetition."""
  of = lambda name: [value(run) for run in runs if run["system"] == name]
  return [a / b for a, b in zip(of(peer), of(base), strict=True)]


def table(runs: list[dict], speeds: dict[str, list[float]]) -> str:
  """A column for each system."""
  systems = [*PEERS, *OURS]
  kept = {run["system"]: run for run in runs if run["name"] == "kept"}
  runs = [run for run in runs if run["name"] == "timed"]
  of = lambda name: [run for run in runs if run["system"] == name]
  steps = lambda key, digits: (
    lambda name: median_range(
      [x for run in of(name) for x in later(run, key)], digits
    )
  )
  ratios = lambda base, value: (
    lambda name: median_range(paired(runs, name, base, value))
  )
  by_step = lambda run: per_step(run, "seconds")
  by_token = lambda run: per_token(run, "seconds")
  other = lambda name: median_range(
    [
      line["seconds"] - line["rollout_seconds"]
      for run in of(name)
      for line in run["steps"][run["skips"] :]
    ]
  )
  rows = {
    "micro-batch": lambda name: of(name)[0]["micro"],
    "seconds a step": steps("seconds", 2),
    "CPU seconds a step": steps("cpu_seconds", 2),
    "of the seconds, rollout": steps("rollout_seconds", 2),
    "of the seconds, the rest": other,
    "tokens generated a step": steps("generated", 0),
    "tokens trained a step": steps("trained", 0),
    "seconds for 1,000 tokens": lambda name: median_range(
      [by_token(run) for run in of(name)]
    ),
    "times grpo's seconds a step": ratios("grpo", by_step),
    "times grpo's, by tokens": ratios("grpo", by_token),
    "times dppo's seconds a step": ratios("dppo", by_step),
    "times dppo's, by tokens": ratios("dppo", by_token),
    "start to the end of step 1, s": lambda name: median_range(
      [run["steps"][0]["seconds"] for run in of(name)], 1
    ),
    "the same with programs kept, s": lambda name: (
      f"{kept[name]['steps'][0]['seconds']:.1f}" if name in kept else ""
    ),
    "decoding alone, tokens a second": lambda name: (
      median_range(speeds[name], 0) if name in speeds else "as grpo"
    ),
  }
  lines = [[name, *map(cell, systems)] for name, cell in rows.items()]
  return tables.markdown(["", *systems], lines)


def time_all(
  bench: Bench, given: dict[str, str], num_steps: int, repeats: int
) -> tuple[list[dict], dict[str, list[float]]]:
  """Chooses sizes of micro-batches that are not given, then measures.

  Returns:
    All runs, and of each system the tokens a second that it decodes alone.
  """
  runs, micro, speeds = [], {}, {}
  total = EPOCHS * num_steps
  try_out = lambda system, micro: measure(
    bench, system, micro, total, 0, "trial", num_steps
  )
  for system, sizes in MICRO.items():
    if system not in given:
      trials = [try_out(system, x) for x in sizes]
      best = min(trials, key=lambda run: per_token(run, "seconds"))
      runs += trials
    micro[system] = given.get(system) or best["micro"]
  for seed in range(repeats):
    turn = seed % len(micro)  # so that drift hits all alike
    for system in [*micro, *micro][turn : turn + len(micro)]:
      size = micro[system]
      runs.append(measure(bench, system, size, total, seed, "timed", num_steps))
  for system in ("tunix", "grpo"):  # once to leave programs, once with them
    runs += [measure(bench, system, micro[system], 2, 0, "kept") for _ in "12"]
  for system in SYSTEMS:
    out = bench.root / "decode" / f"{system}.json"
    bench.call(system, "decode", micro[system], out)
    seconds = json.loads(out.read_text())
    speeds[system] = [work.BATCH * work.NEW / s for s in seconds]
  return runs, speeds


def report(about: dict, measured: tuple) -> None:
  """Writes the results and their table."""
  runs, speeds = measured
  lines = [about, *runs, {"decoded a second": speeds}]
  cores = about["cores"]
  results.write(HERE / f"results-{cores}.jsonl", lines)
  written = table(runs, speeds)
  (HERE / f"table-{cores}.csv").write_text(results.to_csv(written))
  print(written)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--cores", default="0")
  parser.add_argument("--steps", type=int, default=4, help="of an epoch")
  parser.add_argument("--repeats", type=int, default=3)
  parser.add_argument("--workdir", type=pathlib.Path, default="runs/peers")
  parser.add_argument("--envs", type=pathlib.Path, help="WORKDIR/envs")
  parser.add_argument("--micro", default="", help="as trl=8,grpo=8x448")
  parser.add_argument("--only-check", action="store_true")
  args = parser.parse_args()
  if args.steps < 3:
    parser.error(f"--steps is {args.steps} but must be at least 3")
  given = dict(x.split("=") for x in args.micro.split(",") if x)
  for name in given.keys() - MICRO.keys():
    parser.error(f"--micro names {name!r} but there are {', '.join(MICRO)}")
  cores = [int(core) for core in args.cores.split(",")]
  if work.PROMPTS % len(cores):
    parser.error(
      f"--cores has {len(cores)}, which do not divide {work.PROMPTS} prompts"
    )
  root = args.workdir.absolute()
  root.mkdir(parents=True, exist_ok=True)
  envs = (args.envs or root / "envs").absolute()
  bench = Bench(root, envs, cores)
  bench.prepare(args.steps, range(args.repeats))
  largest = {system: sizes[-1] for system, sizes in MICRO.items()}
  about = {
    "differences": check(bench, largest | given),
    "cores": len(cores),
    "machine": platform.processor() or platform.machine(),
    **bench.versions(),
  }
  if not args.only_check:
    report(about, time_all(bench, given, args.steps, args.repeats))


if __name__ == "__main__":
  main()
