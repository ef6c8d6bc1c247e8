"""The mode evaluate: weights, problems, what the completions say."""

from collections.abc import Callable, Iterable, Iterator, Sequence
import functools
import itertools
import json
import os
import pathlib
import time
from typing import Any, NamedTuple, TextIO

import jax
import numpy as np

from dppo_jax import config as configs
from dppo_jax import data, rewards, sharding
from dppo_jax.config.options import flatten
from dppo_jax.eval import page, scores, votes
from dppo_jax.eval import sets as eval_sets
from dppo_jax.metrics import logs, progress
from dppo_jax.models import transformer
from dppo_jax.run import checkpoint, distributed
from dppo_jax.run import workdir as resume
from dppo_jax.run.setup import Run, setup_run
from dppo_jax.step import compiler
from dppo_jax.step import programs as compiled

_SHAPE = ("model.path", "model.hub_id", "model.shape")


def run(
  config: configs.Config, workdir: pathlib.Path, step: int | None = None
) -> None:
  """Evaluates weights; leaves results in `workdir/evaluation/step-K`.

  Args:
    workdir: of the run whose weights these are; without checkpoints in it they
      are those of config.model, before any supervised step.
    step: of the checkpoint; None for the newest.
  Raises:
    ValueError: for a config, data or checkpoint that cannot work.
  """
  logs.quiet_libraries()
  logs.keep_programs()
  start = time.monotonic()
  resume.check_processes(config, workdir)
  with progress.Progress(is_silent=not distributed.is_first()) as bar:
    with bar.task("reading data and model"), distributed.sharing_errors():
      run = setup_run(config, trains=False)
    if not run.eval_sets:
      raise ValueError(
        "config.data.eval is empty: name a source to evaluate on"
      )
    with jax.set_mesh(run.mesh), run.make_grader() as grader:
      for problems in run.eval_sets.values():
        bar.say(progress.wrapped(problems.report))
        with bar.task("starting to grade"), distributed.sharing_errors():
          grader.self_check(problems.columns)
      with bar.task("reading weights"):
        params, step, weights = _weights(run, workdir, step, bar)
      bar.say(progress.wrapped(f"weights: {weights}"))
      programs = _compile(run, bar)
      directory, path = pathlib.Path(), pathlib.Path(os.devnull)
      with distributed.sharing_errors():
        if distributed.is_first():
          parent = workdir / "evaluation"
          directory = _fresh_directory(parent, f"step-{step}", bar)
          path = directory / "completions.jsonl"
      with path.open("w", encoding="utf-8") as file:
        sets = {
          name: _evaluate_set(
            run, programs, params, grader, name, _Log(file, bar)
          )
          for name in run.eval_sets
        }
      news = itertools.chain(*distributed.gather(grader.news()))
      for line in dict.fromkeys(news):
        bar.say(line)
      if not distributed.is_first():
        return
    results = {
      "title": workdir.name or str(workdir),
      "step": step,
      "weights": weights,
      "sampling": _describe_sampling(config),
      "seconds": time.monotonic() - start,
      "config": flatten(config),
      "sets": sets,
    }
    path = page.write(directory, results)
    bar.say("\n".join(["", *page.lines(sets), "", f"results: {path}"]))


def _compile(run: Run, bar: progress.Progress) -> dict[str, Callable]:
  """A program for each way to decode: greedy and perhaps sampled."""
  decodings = {"greedy": 0}
  if run.config.eval.samples:
    decodings["sampled"] = run.config.eval.samples
  programs = {
    name: compiled.evaluation_program(run, samples)
    for name, samples in decodings.items()
  }
  with bar.task("compiling") as task:
    return compiler.compile_programs(programs, run.mesh, task)


def _weights(
  run: Run, workdir: pathlib.Path, step: int | None, bar: progress.Progress
) -> tuple[transformer.Params, int, str]:
  """The weights to evaluate, their step, and what they are in words."""
  if step is not None or any(
    x.name.isdigit() for x in workdir.glob("checkpoints/*")
  ):
    with checkpoint.Checkpoints(workdir, read_only=True) as found:
      step = found.find(step)
      _check_model(run.config, workdir)
      params = found.restore_params(step, compiled.abstract_params(run))
      for line in found.passed_over:
        bar.say(progress.wrapped(line))
    return params, step, f"step {step} of {workdir}"
  options = run.config.model
  name = options.path or options.hub_id
  if not name:
    name = f"random, for {workdir} has no checkpoint and config.model no path"
  return run.initial_params(), 0, name


def _check_model(config: configs.Config, workdir: pathlib.Path) -> None:
  """Refuses a config under which a run's weights would have other shapes."""
  path = workdir / "config.json"
  if config.model.path or config.model.hub_id or not path.is_file():
    return
  saved, given = json.loads(path.read_text("utf-8")), flatten(config)
  for name in _SHAPE:
    if saved.get(name) != given[name]:
      raise ValueError(
        f"config.{name} is {given[name]!r} but was {saved.get(name)!r} in the "
        f"run of {workdir}: leave --config out, and it is that run's"
      )


def _fresh_directory(
  parent: pathlib.Path, name: str, bar: progress.Progress
) -> pathlib.Path:
  """An empty directory; one of that name that there is gets a number."""
  directory = parent / name
  if directory.exists():
    number = 1
    while (older := parent / f"{name}.{number}").exists():
      number += 1
    directory.rename(older)
    bar.say(progress.wrapped(f"earlier results of {name} are now in {older}"))
  directory.mkdir(parents=True)
  return directory


def _describe_sampling(config: configs.Config) -> str:
  e, r = config.eval, config.rollout
  if not e.samples:
    return "none, greedy decoding alone"
  return (
    f"{e.samples} of each problem at temperature "
    f"{e.temperature or r.temperature:g}, top-p {e.top_p or r.top_p:g}"
    + (f", top-k {r.top_k}" if r.top_k else "")
    + f", at most {r.max_tokens:,} tokens"
  )


class _Log(NamedTuple):
  """Where it is told what was sampled: every completion, and how far it is."""

  file: TextIO
  bar: progress.Progress


def _evaluate_set(
  run: Run,
  programs: dict[str, Callable],
  params: transformer.Params,
  grader: rewards.Grader,
  name: str,
  log: _Log,
) -> dict[str, Any]:
  """Samples and grades all completions of a set; what they say.

  Args:
    programs: by the name of a decoding, greedy or sampled.
  """
  problems, scored = run.eval_sets[name], {}
  for decoding, program in programs.items():
    start = time.monotonic()
    found = eval_sets.batches(
      functools.partial(program, params),
      problems,
      run.tokenizer,
      grader,
      eval_sets.rng_of_set(run.root_key, name, [*run.eval_sets].index(name)),
      sharding.round_up(
        run.config.eval.prompts, sharding.num_shards(run.mesh, "batch")
      ),
    )
    completions = _follow(found, problems, name, decoding, log)
    with (
      log.bar.task(f"{name}: comparing answers"),
      distributed.sharing_errors(),
    ):
      cast = _votes(completions, grader)
    scored[decoding] = scores.Scored(
      completions.correct,
      cast,
      completions.lengths,
      completions.is_stopped,
      time.monotonic() - start,
    )
    log.bar.say(
      f"{name}, {decoding}: {completions.lengths.sum():,} tokens in "
      f"{scored[decoding].seconds:.1f} s"
    )
  columns = [x.strip() for x in run.config.eval.columns.split(",")]
  columns = {x: problems.columns[x] for x in columns if x in problems.columns}
  summary = scores.summarize(scored["greedy"], scored.get("sampled"), columns)
  return {"read": problems.report, **summary}


def _follow(
  batches: Iterable[eval_sets.Completions],
  problems: data.ProblemSet,
  name: str,
  decoding: str,
  log: _Log,
) -> eval_sets.Completions:
  """All completions of a set, each written down as soon as it is graded."""
  label = {"set": name, "decoding": decoding}
  parts, done = [], 0
  with log.bar.steps(f"{name}, {decoding}: problem", len(problems)) as steps:
    for part in batches:
      with distributed.sharing_errors():
        for line in _lines(part, problems.names[done:]):
          text = json.dumps(label | line, ensure_ascii=False)
          log.file.write(text + "\n")
        log.file.flush()
      parts.append(part)
      done += len(part.correct)
      accuracy = np.mean([x for y in parts for x in y.correct.mean(axis=1)])
      steps.advance(done, f"accuracy {accuracy:.2f}")
  return eval_sets.join(parts)


def _votes(
  completions: eval_sets.Completions, grader: rewards.Grader
) -> np.ndarray:
  """`[M, k]`, the number of each completion's answer among its problem's."""
  width = completions.correct.shape[1]
  answers = [rewards.last_boxed(x["completion"]) for x in completions.samples]
  groups = [answers[i : i + width] for i in range(0, len(answers), width)]
  return votes.count(groups, completions.correct == 1, grader.same_answers)


def _lines(
  part: eval_sets.Completions, ids: Sequence[str]
) -> Iterator[dict[str, Any]]:
  """The lines of completions.jsonl for some consecutive problems.

  Args:
    ids: of these problems and perhaps of more.
  """
  width = part.correct.shape[1]
  for i, sample in enumerate(part.samples):
    row, column = divmod(i, width)
    yield {
      "id": ids[row],
      "sample": column,
      "problem": sample["problem"],
      "answer": sample["answer"],
      "completion": sample["completion"],
      "extracted": rewards.last_boxed(sample["completion"]),
      "correct": sample["correct"],
      "tokens": int(part.lengths[row, column]),
      "stopped": bool(part.is_stopped[row, column]),
    }
