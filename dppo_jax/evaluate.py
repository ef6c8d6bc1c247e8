"""--mode=evaluate: accuracy of weights on the evaluation sets."""

from collections.abc import Mapping
import itertools
import pathlib
import time
from typing import Any

import jax

from dppo_jax import config as configs
from dppo_jax import distributed, rewards
from dppo_jax.analysis import tables
from dppo_jax.errors import UserError
from dppo_jax.eval import eval_sets, page
from dppo_jax.files import bucket, jsonl
from dppo_jax.metrics import progress
from dppo_jax.models import parameters
from dppo_jax.run import checkpoint, checkpoint_steps, compile_cache, resume
from dppo_jax.run.description import warnings
from dppo_jax.run.setup import Run, setup_run
from dppo_jax.step import abstract_values, programs, runtime_checks


def run(
  config: configs.Config, workdir: pathlib.Path, step: int | str | None = None
) -> None:
  """Evaluates weights and writes the results to `workdir/evaluation/step-K`.

  Args:
    config: names the evaluation sets, and the model if there is no checkpoint.
    workdir: directory of the run; without checkpoints in it, the weights come
      from config.model, before supervised fine-tuning.
    step: checkpoint step, or "best"; None for the latest.
  Raises:
    UserError: for an invalid config, data set or checkpoint.
  """
  config, workdir = configs.absolute_paths(config), workdir.absolute()
  compile_cache.enable_compilation_cache()
  start = time.monotonic()
  resume.check_processes(config, workdir)
  step = find_step(config, workdir, step)
  with progress.Progress() as bar:
    with bar.task("reading data and model"):
      run = setup_run(config, trains=False)
    if not run.eval_sets:
      raise UserError("config.data.eval is empty: name a source to evaluate on")
    with jax.set_mesh(run.spec.mesh), run.make_grader() as grader:
      for problems in run.eval_sets.values():
        bar.say(progress.wrapped(problems.report))
        with bar.task("starting to grade"), distributed.sharing_errors():
          grader.self_check(problems.columns, verifier_only=True)
      with bar.task("reading weights"):
        params, weights = read_weights(run, workdir, step)
      messages = [f"weights: {weights}", *warnings(run, config)]
      bar.say(progress.wrapped("\n".join(messages)))
      to_compile = {"greedy": eval_sets.program(run, 0)}
      if samples := config.eval.samples:
        sampled = eval_sets.program(run, samples)
        to_compile = {"sampled": sampled, **to_compile}
      with bar.task("compiling") as task:
        compiled = programs.compile_programs(to_compile, task)
      step = step or 0
      with distributed.sharing_errors():
        if distributed.is_first():
          directory = _make_directory(workdir, step)
      lines: list[dict] = []
      sets = {
        name: _evaluate_set(run, compiled, params, grader, name, lines, bar)
        for name in run.eval_sets
      }
      lost = itertools.chain(*distributed.gather(grader.pop_warnings()))
      for line in dict.fromkeys(lost):
        bar.say(line)
    if distributed.is_first():
      if bucket.url(workdir):  # another machine may have taken the name
        directory = _make_directory(workdir, step)
      bar.say(f"\n{page.table(sets, tables.aligned)}\n")
      jsonl.replace(directory / "completions.jsonl", map(jsonl.line, lines))
      r = config.rollout
      results = {
        "title": workdir.name or str(workdir),
        "step": step,
        "weights": weights,
        "sampling": f"{config.eval.samples} per problem, temperature "
        f"{r.temperature:g}, top-p {r.top_p:g}, top-k {r.top_k or 'off'}, "
        f"at most {r.max_tokens:,} tokens",
        "seconds": time.monotonic() - start,
        "config": configs.flatten(config),
        "sets": sets,
      }
      path = page.write(directory, results)
      bar.say(f"results: {bucket.shown(path)}")
      bucket.send(directory)


def find_step(
  config: configs.Config, workdir: pathlib.Path, step: int | str | None
) -> int | None:
  """Returns the step of the weights; None if config.model has them.

  Raises UserError if there is no such step.
  """
  if step is None and not checkpoint_steps.complete_steps(workdir):
    return None
  return checkpoint_steps.find(workdir, step, best=config.checkpoint.best)


def read_weights(
  run: Run, workdir: pathlib.Path, step: int | None
) -> tuple[parameters.Params, str]:
  """Returns the weights of a step of `find_step`, and their origin as text."""
  if step is None:
    origin, params = run.origin, run.initial_params()
  else:
    with checkpoint.Checkpoints(workdir, read_only=True) as checkpoints:
      like = abstract_values.abstract_params(run.spec)
      params = checkpoints.restore_params(step, like)
    origin = f"step {step} of {bucket.place(workdir)}"
  advice = f"{origin} cannot be used; choose other weights with --step"
  runtime_checks.check_params(params, advice)
  return params, origin


def _make_directory(workdir: pathlib.Path, step: int) -> pathlib.Path:
  """Creates `step-K`, or `step-K.1` and so on if earlier results exist."""
  names = (f"step-{step}.{i}" if i else f"step-{step}" for i in range(10**6))
  with bucket.reaching(workdir / "evaluation") as earlier:
    name = next(x for x in names if not (earlier / x).exists())
  path = workdir / "evaluation" / name
  path.mkdir(parents=True, exist_ok=bool(bucket.url(workdir)))
  return path


def _evaluate_set(
  run: Run,
  compiled: Mapping[str, jax.stages.Compiled],
  params: parameters.Params,
  grader: rewards.Grader,
  name: str,
  lines: list[dict],
  bar: progress.Progress,
) -> dict[str, Any]:
  """Evaluates a set, adds completions to `lines` and returns its results."""
  problems = run.eval_sets[name]
  estimates, described = {}, {}
  for decoding, roll_out in compiled.items():
    start = time.monotonic()
    with bar.steps(f"{name}, {decoding}: problem", len(problems)) as steps:
      completions = eval_sets.evaluate(
        run, name, roll_out, params, grader, steps.advance
      )
    label = {"set": name, "decoding": decoding}
    lines += [label | x for x in completions.samples]
    texts = (x["completion"] for x in completions.samples)
    unboxed = [rewards.last_boxed(text) is None for text in texts]
    described[decoding] = completions.metrics() | {
      "completions": len(unboxed),
      "unboxed": sum(unboxed) / len(unboxed),
      "seconds": time.monotonic() - start,
    }
    if decoding == "greedy":
      estimates["greedy"] = completions.accuracy()
    else:
      estimates |= completions.estimates()
  return {
    "read": problems.report,
    "problems": len(problems),
    "estimates": {key: x._asdict() for key, x in estimates.items()},
    "completions": described,
  }
