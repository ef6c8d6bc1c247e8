"""The training loop, and what follows each step: logs, checks, checkpoints.

A step has four stages: collect (draw -> choose prompts -> roll out -> grade ->
update history), select (advantages, completions, weights, packing), score (old
log-probabilities, tokens) and update.
"""

from collections.abc import Callable, Iterator, Sequence
import contextlib
import dataclasses
import functools
import gc
import itertools
import numbers
import pathlib
import traceback

import jax

from dppo_jax import config as configs
from dppo_jax import data, rewards
from dppo_jax.config.options import flatten
from dppo_jax.errors import UserError
from dppo_jax.eval import sets as eval_sets
from dppo_jax.metrics import progress, report, samples, trackers
from dppo_jax.metrics import warnings as health
from dppo_jax.metrics import writer as metrics
from dppo_jax.records import TrainState
from dppo_jax.rng import rng_at
from dppo_jax.run import (
  checkpoint,
  compile_cache,
  distributed,
  runtime_checks,
  signals,
)
from dppo_jax.run import workdir as resume
from dppo_jax.run.setup import Run, setup_run
from dppo_jax.step.grade import with_texts
from dppo_jax.step.initial_state import (
  first_state,
  reference_params,
  resumed_state,
)
from dppo_jax.step.train_step import StepInfo, TrainStep

# `(step, info, state) -> metrics`, called after each step; may return None.
Callback = Callable[[int, StepInfo, TrainState], dict[str, float] | None]


def run(
  config: configs.Config,
  workdir: pathlib.Path,
  callbacks: Sequence[Callback] = (),
) -> None:
  """Trains in `workdir`, resuming from its latest checkpoint if there is one.

  Args:
    callbacks: called after each step with the number of steps done, the results
      of the step and the train state. Every process calls them. Metrics that
      they return are logged with those of the step.
  Raises:
    UserError: for a config, data or checkpoint that cannot work, or if the
      gradient stays non-finite.
  """
  compile_cache.quiet_libraries()
  compile_cache.enable_compilation_cache()
  with signals.stop_signals(lambda: resume.describe_stop(workdir)) as stop:
    resume.check_processes(config, workdir)
    if not resume.is_done(config, workdir):
      _run(config, workdir, tuple(callbacks), stop)


def _run(
  config: configs.Config,
  workdir: pathlib.Path,
  callbacks: tuple[Callback, ...],
  stop: signals.StopRequest,
) -> None:
  with progress.Progress(is_silent=not distributed.is_first()) as bar:
    with bar.task("reading data and model"), distributed.sharing_errors():
      run = setup_run(config)
    with (
      resume.held(
        workdir / "config.json",
        config,
        resume.fingerprints(config, run.train_set),
      ),
      jax.set_mesh(run.mesh),
      run.make_grader() as grader,
      checkpoint.Checkpoints(
        workdir, config.checkpoint.keep, every=config.checkpoint.every
      ) as checkpoints,
    ):
      # Before the writer, which drops lines after the latest intact checkpoint.
      damaged = checkpoints.recover()
      with _open_writer(config, workdir, checkpoints, bar) as writer:
        for line in damaged:
          writer.say(line)
        _train_and_report(
          run, grader, checkpoints, writer, workdir, callbacks, stop
        )


def _train_and_report(
  run: Run,
  grader: rewards.Grader,
  checkpoints: checkpoint.Checkpoints,
  writer: metrics.Writer,
  workdir: pathlib.Path,
  callbacks: tuple[Callback, ...],
  stop: signals.StopRequest,
) -> None:
  """Runs the training from its first line to its report; logs failures."""
  try:
    writer.say(run.description())
    with writer.bar.task("starting to grade"), distributed.sharing_errors():
      grader.self_check(run.train_set.columns)
    page = report.LiveReport(workdir, writer)
    _train(run, grader, checkpoints, writer, page, callbacks, stop)
    with writer.bar.task("writing the report"), distributed.sharing_errors():
      if distributed.is_first():
        writer.say(f"report: {page.write(run.config.steps)}")
  except Exception:
    writer.log(traceback.format_exc())
    raise


def _open_writer(
  config: configs.Config,
  workdir: pathlib.Path,
  checkpoints: checkpoint.Checkpoints,
  bar: progress.Progress,
) -> metrics.Writer | metrics.Silent:
  """Opens the run's logs; only the first process writes."""
  latest = checkpoints.latest_step()
  with distributed.sharing_errors():
    if not distributed.is_first():
      return metrics.Silent(bar)
    return metrics.Writer(
      workdir,
      latest,
      bar,
      health.Health(config.objective.num_updates),
      trackers.openers(
        workdir, flatten(config), **dataclasses.asdict(config.log)
      ),
    )


def _train(
  run: Run,
  grader: rewards.Grader,
  checkpoints: checkpoint.Checkpoints,
  writer: metrics.Writer,
  page: report.LiveReport,
  callbacks: tuple[Callback, ...],
  stop: signals.StopRequest,
) -> None:
  with writer.bar.task("compiling") as task:
    train_step = TrainStep(run, grader, task)
  evaluate = functools.partial(_evaluate, run, train_step, grader, writer)
  state = _begin(run, checkpoints, writer, evaluate)
  reference = reference_params(run, checkpoints)
  first, config = int(state.step), run.config
  # The first draw shuffles the epoch, which compiles; no later one does.
  data.draw(run.train_set, run.root_key, 0, config.data.prompts_per_step)

  with (
    compile_cache.Compilations() as compilations,
    stop.after_step(),
    _frozen_heap(),
    writer.bar.steps("step", config.steps, first) as bar,
  ):
    log = _Log(run, grader, writer, bar, compilations, callbacks)
    hooks = (
      log,
      _check,
      _Evaluation(config, writer, page, evaluate),
      _Saving(config, writer, checkpoints, stop),
    )
    for step in range(first, config.steps):
      rng = rng_at(run.root_key, step)
      state, experience = train_step.collect(state)  # rollouts and rewards
      batch = train_step.select(rng, experience, state)  # weights and rows
      batch = train_step.score(rng, state.params, batch)  # token weights
      state, info = train_step.update(state, reference, batch)
      for after_step in hooks:  # log, check, evaluate, save and stop
        after_step(step + 1, state, info)


@contextlib.contextmanager
def _frozen_heap() -> Iterator[None]:
  """Excludes existing objects from garbage collections.

  They are mostly jax traces, and walking them stalls one step in a hundred for
  0.3 s.
  """
  gc.freeze()
  try:
    yield
  finally:
    gc.unfreeze()


def _begin(
  run: Run,
  checkpoints: checkpoint.Checkpoints,
  writer: metrics.Writer,
  evaluate: Callable[[TrainState], None],
) -> TrainState:
  """Makes, evaluates and saves a first state, or restores the latest one."""
  latest = checkpoints.latest_step()
  if latest is not None:
    writer.say(f"resuming after step {latest}")
    with writer.bar.task("reading the checkpoint"):
      return resumed_state(run, checkpoints, latest)
  state = first_state(run, writer)
  evaluate(state)
  with distributed.sharing_errors():
    writer.sync()
  checkpoints.save(0, state)
  return state


class _Log:
  """Writes the metrics and samples of a step, and calls the callbacks."""

  def __init__(self, run, grader, writer, bar, compilations, callbacks):
    self._run, self._grader, self._writer = run, grader, writer
    self._bar, self._compilations = bar, compilations
    self._callbacks = callbacks

  def __call__(self, done: int, state: TrainState, info: StepInfo) -> None:
    values = info.metrics(self._grader.specs)
    values = {name: float(x) for name, x in values.items()}
    values["update/compiles"] = self._compilations.since_last()
    for callback in self._callbacks:
      values |= _checked_metrics(callback, callback(done, info, state))
    summary = info.summary
    lines = with_texts(
      samples.of_step(
        info.experience.samples,
        summary.lengths,
        summary.advantages,
        summary.weights,
      )
    )
    warnings = itertools.chain(*distributed.gather(self._grader.pop_warnings()))
    with distributed.sharing_errors():
      self._writer.write(done, values)
      self._writer.write_samples(done, "train", lines)
      for line in dict.fromkeys(warnings):
        self._writer.say(line)
    self._bar.advance(done, *_note(values))


def _checked_metrics(callback: Callback, returned: object) -> dict[str, float]:
  """Returns a callback's metrics; raises UserError if they are not numbers."""
  values = {} if returned is None else returned
  is_number = lambda x: (
    isinstance(x, numbers.Real) or (hasattr(x, "ndim") and x.ndim == 0)
  )
  if not isinstance(values, dict) or not all(map(is_number, values.values())):
    name = getattr(callback, "__name__", callback)
    raise UserError(
      f"the callback {name} returned {returned!r} but must return None or a "
      "dict of numbers; see config.callbacks"
    )
  return {str(name): float(x) for name, x in values.items()}


def _check(done: int, state: TrainState, info: StepInfo) -> None:
  """Stops a run that diverged."""
  u = info.update
  runtime_checks.check_update(
    done,
    u.num_nonfinite_params,
    u.num_skipped_in_a_row,
    f"norm {u.grad_norm}, loss {u.loss}, largest weight "
    f"{info.select.diagnostics['weights/max']:.1f}",
  )


class _Evaluation:
  """Evaluates and refreshes the report where due."""

  def __init__(self, config, writer, page, evaluate):
    self._config, self._writer = config, writer
    self._page, self._evaluate = page, evaluate

  def __call__(self, done: int, state: TrainState, info: StepInfo) -> None:
    every = self._config.eval.every
    if done == self._config.steps or (every and done % every == 0):
      self._evaluate(state)
      with distributed.sharing_errors():
        if distributed.is_first():
          self._page.refresh(done)


class _Saving:
  """Saves where due, and stops the run if a signal asked for it."""

  def __init__(self, config, writer, checkpoints, stop):
    self._config, self._writer = config, writer
    self._checkpoints, self._stop = checkpoints, stop

  def __call__(self, done: int, state: TrainState, info: StepInfo) -> None:
    is_last = done == self._config.steps
    stops = any(distributed.gather(self._stop.is_requested))
    if is_last or stops or self._checkpoints.is_due(done):
      with distributed.sharing_errors():
        self._writer.sync()
      self._checkpoints.save(done, state)
    if stops and not is_last:
      raise KeyboardInterrupt


def _evaluate(
  run: Run,
  train_step: TrainStep,
  grader: rewards.Grader,
  writer: metrics.Writer,
  state: TrainState,
) -> None:
  """Writes the accuracy on every evaluation set, and some answers."""
  step, values = int(state.step), {}
  for number, name in enumerate(run.eval_sets):
    with writer.bar.task(f"evaluating on {name}"):
      completions = eval_sets.evaluate(
        run,
        name,
        functools.partial(train_step.evaluate, state.params),
        grader,
      )
    # Metrics of the first set do not depend on its name.
    stage = f"eval/{name}" if number else "eval"
    new = {f"{stage}/{x}": value for x, value in completions.metrics().items()}
    values |= new
    with distributed.sharing_errors():
      writer.write_samples(step, stage, completions.samples[:8])
      writer.say(
        f"step {step}: {f'{name} ' if len(run.eval_sets) > 1 else 'held-out '}"
        f"accuracy {new[f'{stage}/accuracy']:.3f}"
        f" ± {new[f'{stage}/stderr']:.3f}"
        f" ({new[f'{stage}/tokens']:.1f} tokens a completion)"
      )
  with distributed.sharing_errors():
    if values:
      writer.write(step, values)


def _note(values: dict[str, float]) -> Iterator[str]:
  """Yields the most important numbers of a step, in a few words each."""
  trained = values["completions/trained"] / max(values["completions/drawn"], 1)
  yield f"sampled accuracy {values['reward/accuracy']:.2f}"
  if "budget/completions" in values:
    yield (
      f"trains {values['budget/completions']:.0%} of completions with an "
      f"advantage, predicted {values['budget/predicted_speedup']:.1f}x faster"
    )
  else:
    yield f"trained {trained:.0%}"
  yield f"{values['step/seconds']:.2f} s/step"
  if values["update/skipped"]:
    yield f"{values['update/skipped']:.0f} updates skipped"
