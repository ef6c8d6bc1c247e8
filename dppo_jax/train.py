"""The training loop, and what follows each step: logs, checks, checkpoints.

A step has four stages: collect (draw -> choose prompts -> roll out -> grade ->
update history), select (advantages, completions, weights, packing), score (old
log-probabilities, tokens) and update.
"""

from collections.abc import Callable, Iterator, Sequence
import contextlib
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
from dppo_jax.metrics.writer import Silent, Writer
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
from dppo_jax.step import initial_state
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
    callbacks: called after each step, in addition to those of the config, with
      the number of steps done, the results of the step and the train state.
      Every process calls them. Metrics that they return are logged with those
      of the step.
  Raises:
    UserError: for a config, data or checkpoint that cannot work, or if the
      gradient stays non-finite.
  """
  compile_cache.quiet_libraries()
  compile_cache.enable_compilation_cache()
  with signals.stop_signals(lambda: resume.describe_stop(workdir)) as stop:
    resume.check_processes(config, workdir)
    if not resume.is_done(config, workdir):
      callbacks = (*callbacks, *configs.load_callbacks(config))
      _run(config, workdir, callbacks, stop)


def _run(
  config: configs.Config,
  workdir: pathlib.Path,
  callbacks: Sequence[Callback],
  stop: signals.StopRequest,
) -> None:
  """Opens all that a run needs, trains, and writes the report."""
  with contextlib.ExitStack() as stack:
    bar = stack.enter_context(
      progress.Progress(is_silent=not distributed.is_first())
    )
    with bar.task("reading data and model"), distributed.sharing_errors():
      run = setup_run(config)
    prints = resume.fingerprints(config, run.train_set)
    stack.enter_context(resume.held(workdir / "config.json", config, prints))
    stack.enter_context(jax.set_mesh(run.mesh))
    grader = stack.enter_context(run.make_grader())
    checkpoints = stack.enter_context(
      checkpoint.Checkpoints(
        workdir, config.checkpoint.keep, every=config.checkpoint.every
      )
    )
    # Before the writer, which drops lines after the latest intact checkpoint.
    warnings = checkpoints.recover()
    writer = stack.enter_context(_open_writer(run, workdir, checkpoints, bar))
    try:
      for line in (*warnings, run.description()):
        writer.say(line)
      with bar.task("starting to grade"), distributed.sharing_errors():
        grader.self_check(run.train_set.columns)
      page = report.LiveReport(workdir, writer)
      session = _Session(run, grader, checkpoints, writer, page, stop)
      _train(session, tuple(callbacks))
      with bar.task("writing the report"), distributed.sharing_errors():
        if distributed.is_first():
          writer.say(f"report: {page.write(config.steps)}")
    except Exception:
      writer.log(traceback.format_exc())
      raise


def _open_writer(
  run: Run,
  workdir: pathlib.Path,
  checkpoints: checkpoint.Checkpoints,
  bar: progress.Progress,
) -> Writer | Silent:
  """Opens the run's logs; only the first process writes."""
  latest, config = checkpoints.latest_step(), run.config
  with distributed.sharing_errors():
    if not distributed.is_first():
      return Silent(bar)
    watch = health.Health(config.objective.num_updates)
    openers = trackers.openers(
      workdir, flatten(config), writers=config.log.writers
    )
    return Writer(workdir, latest, bar, watch, openers)


def _train(session: "_Session", callbacks: tuple[Callback, ...]) -> None:
  """Trains to the last step; `session` keeps the logs and checkpoints."""
  run, config = session.run, session.run.config
  with session.writer.bar.task("compiling") as task:
    train_step = session.train_step = TrainStep(run, session.grader, task)
  state = session.begin()
  reference = initial_state.reference_params(run, session.checkpoints)
  # The first draw shuffles the epoch, which compiles; no later one does.
  data.draw(run.train_set, run.root_key, 0, config.data.prompts_per_step)
  first = int(state.step)
  with (
    compile_cache.Compilations() as compilations,
    session.stop.after_step(),
    _frozen_heap(),
    session.writer.bar.steps("step", config.steps, first) as bar,
  ):
    log = functools.partial(session.log, callbacks, compilations, bar)
    hooks = (log, session.check, session.evaluate_if_due, session.save_if_due)
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


class _Session:
  """A run with its open files; most methods are hooks after a step."""

  train_step: TrainStep

  def __init__(
    self,
    run: Run,
    grader: rewards.Grader,
    checkpoints: checkpoint.Checkpoints,
    writer: Writer | Silent,
    page: report.LiveReport,
    stop: signals.StopRequest,
  ):
    self.run, self.grader, self.checkpoints = run, grader, checkpoints
    self.writer, self.page, self.stop = writer, page, stop

  def begin(self) -> TrainState:
    """Makes, evaluates and saves a first state, or restores the latest one."""
    latest = self.checkpoints.latest_step()
    if latest is not None:
      self.writer.say(f"resuming after step {latest}")
      with self.writer.bar.task("reading the checkpoint"):
        return initial_state.resumed_state(self.run, self.checkpoints, latest)
    state = initial_state.first_state(self.run, self.writer)
    self.evaluate(state)
    self._save(0, state)
    return state

  def log(
    self,
    callbacks: tuple[Callback, ...],
    compilations: compile_cache.Compilations,
    bar,
    done: int,
    state: TrainState,
    info: StepInfo,
  ) -> None:
    """Writes the metrics and samples of a step, and calls the callbacks."""
    values = info.metrics(self.grader.specs)
    values = {name: float(x) for name, x in values.items()}
    values["update/compiles"] = compilations.since_last()
    for callback in callbacks:
      values |= _checked_metrics(callback, callback(done, info, state))
    x = info.summary
    lines = samples.of_step(
      info.experience.samples, x.lengths, x.advantages, x.weights
    )
    warnings = distributed.gather(self.grader.pop_warnings())
    with distributed.sharing_errors():
      self.writer.write(done, values)
      self.writer.write_samples(done, "train", lines)
      for line in dict.fromkeys(itertools.chain(*warnings)):
        self.writer.say(line)
    bar.advance(done, *_note(values))

  def check(self, done: int, state: TrainState, info: StepInfo) -> None:
    """Stops a run that diverged."""
    runtime_checks.check_update(
      done,
      info.update.nonfinite_params,
      info.update.skipped_in_a_row,
      f"norm {info.update.grad_norm}, loss {info.update.loss}, largest weight "
      f"{info.select.diagnostics['weights/max']:.1f}",
    )

  def evaluate_if_due(
    self, done: int, state: TrainState, info: StepInfo
  ) -> None:
    """Evaluates every `config.eval.every` steps and after the last one."""
    every = self.run.config.eval.every
    if done == self.run.config.steps or (every and done % every == 0):
      self.evaluate(state)
      with distributed.sharing_errors():
        if distributed.is_first():
          self.page.refresh(done)

  def save_if_due(self, done: int, state: TrainState, info: StepInfo) -> None:
    """Saves where due, and stops the run if a signal asked for it."""
    is_last = done == self.run.config.steps
    stops = any(distributed.gather(self.stop.is_requested))
    if is_last or stops or self.checkpoints.is_due(done):
      self._save(done, state)
    if stops and not is_last:
      raise KeyboardInterrupt

  def _save(self, step: int, state: TrainState) -> None:
    with distributed.sharing_errors():
      self.writer.sync()
    self.checkpoints.save(step, state)

  def evaluate(self, state: TrainState) -> None:
    """Writes the accuracy on every evaluation set, and some answers."""
    step, values, sets = int(state.step), {}, self.run.eval_sets
    for number, name in enumerate(sets):
      with self.writer.bar.task(f"evaluating on {name}"):
        program = self.train_step.programs["evaluate"]
        roll_out = functools.partial(program, state.params)
        completions = eval_sets.evaluate(self.run, name, roll_out, self.grader)
      # Metrics of the first set do not depend on its name.
      stage = f"eval/{name}" if number else "eval"
      new = completions.metrics()
      values |= {f"{stage}/{x}": value for x, value in new.items()}
      with distributed.sharing_errors():
        self.writer.write_samples(step, stage, completions.samples[:8])
        self.writer.say(
          f"step {step}: {name if len(sets) > 1 else 'held-out'} accuracy "
          f"{new['accuracy']:.3f} ± {new['stderr']:.3f} "
          f"({new['tokens']:.1f} tokens a completion)"
        )
    with distributed.sharing_errors():
      if values:
        self.writer.write(step, values)


def _checked_metrics(callback: Callback, returned: object) -> dict[str, float]:
  """Returns a callback's metrics; raises UserError if they are not numbers."""
  values = {} if returned is None else returned
  is_number = lambda x: (
    isinstance(x, numbers.Real) or (getattr(x, "ndim", None) == 0)
  )
  if not isinstance(values, dict) or not all(map(is_number, values.values())):
    name = getattr(callback, "__name__", callback)
    raise UserError(
      f"the callback {name} returned {returned!r} but must return None or a "
      "dict of numbers; see config.callbacks"
    )
  return {str(name): float(x) for name, x in values.items()}


def _note(values: dict[str, float]) -> Iterator[str]:
  """Yields the most important numbers of a step, in a few words each."""
  yield f"sampled accuracy {values['reward/accuracy']:.2f}"
  if "budget/completions" in values:
    yield (
      f"trains {values['budget/completions']:.0%} of completions with an "
      f"advantage, predicted {values['budget/predicted_speedup']:.1f}x faster"
    )
  else:
    drawn = max(values["completions/drawn"], 1)
    yield f"trained {values['completions/trained'] / drawn:.0%}"
  yield f"{values['step/seconds']:.2f} s/step"
  if values["update/skipped"]:
    yield f"{values['update/skipped']:.0f} updates skipped"
