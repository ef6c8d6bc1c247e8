"""The training loop, and what follows each step: logs, checks, checkpoints."""

from collections.abc import Callable, Sequence
import contextlib
import dataclasses
import functools
import gc
import itertools
import pathlib
import traceback

import jax
import numpy as np

from dppo_jax import config as configs
from dppo_jax import data, distributed, rewards
from dppo_jax.analysis import runs, statistics
from dppo_jax.config.options import flatten
from dppo_jax.errors import StopTraining, Unreachable, UserError
from dppo_jax.eval import estimators, eval_sets
from dppo_jax.files import bucket
from dppo_jax.metrics import health, progress, report, samples
from dppo_jax.metrics.writer import Silent, Writer
from dppo_jax.planning import memory
from dppo_jax.records import TrainState
from dppo_jax.rng import rng_at
from dppo_jax.run import (
  checkpoint,
  compile_cache,
  initial_state,
  resume,
  signals,
)
from dppo_jax.run.setup import Run, setup_run
from dppo_jax.step import programs, runtime_checks
from dppo_jax.step.step_info import StepInfo
from dppo_jax.step.train_step import TrainStep

# `(step, info, state) -> metrics`, called after each step; may return None.
Callback = Callable[[int, StepInfo, TrainState], dict[str, float] | None]


def run(
  config: configs.Config,
  workdir: pathlib.Path,
  callbacks: Sequence[Callback] = (),
  allow_change: str = "",
) -> None:
  """Trains in `workdir`, resuming from its latest checkpoint if there is one.

  Args:
    callbacks: called after each step, in addition to the config's, with the
      number of steps done, the results of the step and the train state. Every
      process calls them. Metrics that they return are logged with the step's.
    allow_change: "optimizer" to resume with other options of the optimizer.
  Raises:
    UserError: for invalid config, data or checkpoints, or a non-finite
      gradient.
  """
  compile_cache.quiet_libraries()
  compile_cache.enable_compilation_cache()
  with signals.stop_signals(lambda: resume.describe_stop(workdir)) as stop:
    resume.check_processes(config, workdir)
    if not resume.is_done(config, workdir, allow_change):
      callbacks = (*callbacks, *configs.load_callbacks(config))
      _run(config, workdir, callbacks, stop, allow_change)


def _run(
  config: configs.Config,
  workdir: pathlib.Path,
  callbacks: Sequence[Callback],
  stop: signals.StopRequest,
  allow_change: str,
) -> None:
  """Opens all that a run needs, trains, and writes the report."""
  with contextlib.ExitStack() as stack:
    bar = stack.enter_context(
      progress.Progress(is_silent=not distributed.is_first())
    )
    with bar.task("reading data and model"), distributed.sharing_errors():
      run = memory.choose_slots(setup_run(config))
      memory.check(run)
      eval_sets.check_metric(run, config.checkpoint.best)
    prints = resume.fingerprints(config, run.train_set)
    path = workdir / "config.json"
    changes = stack.enter_context(
      resume.held(path, config, prints, allow_change)
    )
    stack.enter_context(jax.set_mesh(run.spec.mesh))
    grader = stack.enter_context(run.make_grader())
    checkpoints = stack.enter_context(
      checkpoint.Checkpoints(
        workdir, config.checkpoint.keep, config.checkpoint.best
      )
    )
    # Before the writer, which drops lines after the latest intact checkpoint.
    warnings = checkpoints.recover()
    latest = checkpoints.latest_step()
    with distributed.sharing_errors():
      writer = Silent(bar)
      if distributed.is_first():
        watch = health.Health(config.objective.num_updates)
        trackers, options = config.log.writers, flatten(config)
        writer = Writer(workdir, latest, bar, watch, trackers, options)
        stack.enter_context(writer)
    try:
      for line in (*warnings, *changes, run.description()):
        writer.say(line)
      with bar.task("starting to grade"), distributed.sharing_errors():
        grader.self_check(run.train_set.columns)
      with bar.task("compiling") as task:
        compiled = _compile(run, task)
      stack.callback(gc.unfreeze)
      _train(
        _Session(
          workdir=workdir,
          run=run,
          compiled=compiled,
          grader=grader,
          checkpoints=checkpoints,
          writer=writer,
          stop=stop,
          callbacks=callbacks,
        )
      )
      with bar.task("writing the report"), distributed.sharing_errors():
        if distributed.is_first():
          writer.say(f"report: {bucket.shown(report.write(workdir))}")
          writer.say(report.headline(runs.load(workdir)))
      if bucket.url(workdir) and (problem := bucket.upload_from_all(workdir)):
        raise Unreachable(problem)
    except Exception:
      writer.log(traceback.format_exc())
      raise


def _compile(run: Run, task: progress.Task) -> dict[str, jax.stages.Compiled]:
  """Compiles the stages of a step, and evaluations if there are problems."""
  table, samples = programs.step_programs(run.spec), run.config.eval.samples
  if run.eval_sets:
    table["evaluate"] = eval_sets.program(run, samples)
    if samples:  # the first and the last evaluation are greedy too
      table["evaluate_greedy"] = eval_sets.program(run, samples=0)
  return programs.compile_programs(table, run.spec.mesh, task)


def _train(session: "_Session") -> None:
  """Trains to the last step; `session` keeps the logs and checkpoints."""
  run, root_key = session.run, session.run.spec.root_key
  train_step = TrainStep(
    run.spec, run.train_set, run.tokenizer, session.grader, session.compiled
  )
  state = session.begin()
  reference = initial_state.reference_params(run, session.checkpoints)
  # The first draw shuffles the epoch, which compiles; no later one does.
  data.draw(run.train_set, root_key, 0, run.spec.num_prompts)
  first = int(state.step)
  # Excludes what exists, mostly jax traces, from garbage collections: walking
  # it stalls one step in a hundred for 0.3 s.
  gc.freeze()
  with (
    compile_cache.compilations() as compilations,
    session.stop.deferred(),
    session.writer.bar.steps("step", run.config.steps, first),
  ):
    for step in range(first, run.config.steps):  # see `TrainStep`
      rng = rng_at(root_key, step)
      state, experience = train_step.collect(state)  # rollouts and rewards
      batches = train_step.select(rng, experience, state)  # one per update
      batches = train_step.score(rng, state.params, batches)  # tokens
      state, updates = train_step.update(state, reference, batches)
      info = train_step.info(state, experience, batches, updates)
      if session.after_step(step + 1, state, info, len(compilations)):
        break
      compilations.clear()


@dataclasses.dataclass
class _Session:
  """A run with its open files, and what follows each step."""

  workdir: pathlib.Path
  run: Run
  compiled: dict[str, jax.stages.Compiled]
  grader: rewards.Grader
  checkpoints: checkpoint.Checkpoints
  writer: Writer | Silent
  stop: signals.StopRequest
  callbacks: Sequence[Callback]
  evaluation: dict[str, float] = dataclasses.field(default_factory=dict)

  def begin(self) -> TrainState:
    """Makes, evaluates and saves a first state, or restores the latest one."""
    latest = self.checkpoints.latest_step()
    if latest is not None:
      self.writer.say(f"resuming after step {latest}")
      with self.writer.bar.task("reading the checkpoint"):
        return initial_state.resumed_state(self.run, self.checkpoints, latest)
    state = initial_state.first_state(self.run, self.writer)
    self._evaluate(state, is_end=True)
    self._save(0, state)
    return state

  def after_step(
    self, done: int, state: TrainState, info: StepInfo, num_compiled: int
  ) -> bool:
    """Logs and checks a step, then evaluates, saves and stops where due.

    Returns True if a callback has ended the run.
    """
    info = info._replace(evaluation=self.evaluation)
    is_ended = self._log(done, state, info, num_compiled)
    runtime_checks.check_update(
      done,
      info.update.nonfinite_params,
      info.update.skipped_in_a_row,
      f"norm {info.update.grad_norm}, loss {info.update.loss}, largest weight "
      f"{max(x.info.diagnostics['weights/max'] for x in info.batches):.1f}",
    )
    config = self.run.config
    is_ended = any(distributed.gather(is_ended))
    is_last = is_ended or done == config.steps
    is_best = False
    if is_last or _is_due(done, config.eval.every):
      is_best = self._evaluate(state, is_end=is_last)
    stops = any(distributed.gather(self.stop.is_requested))
    is_due = _is_due(done, config.checkpoint.every)
    if is_last or stops or is_best or is_due:
      self._save(done, state)
    if stops and not is_last:
      raise KeyboardInterrupt
    return is_ended

  def _log(
    self, done: int, state: TrainState, info: StepInfo, num_compiled: int
  ) -> bool:
    """Writes the metrics and samples of a step, and calls the callbacks.

    Returns True if one of them ends the run.
    """
    values, is_ended = info.metrics(self.grader.specs), False
    values["update/compiles"] = num_compiled
    for callback in self.callbacks:
      try:
        values = call(callback, values, done, info, state)
      except StopTraining:
        is_ended = True
    x = info.summary
    groups = samples.with_outcomes(
      info.experience.samples, x.advantages, x.weights
    )
    warnings = distributed.gather(self.grader.pop_warnings())
    with distributed.sharing_errors():
      self.writer.write(done, values)
      self.writer.write_samples(done, "train", samples.choose(groups))
      if self.run.config.log.completions:
        self.writer.write_completions(done, itertools.chain(*groups))
      for line in dict.fromkeys(itertools.chain(*warnings)):
        self.writer.say(line)
    drawn = max(values["completions/drawn"], 1)
    solved = [np.mean([x["correct"] for x in group]) for group in groups]
    accuracy = estimators.interval(np.array(solved), self.run.spec.group_size)
    trained = f"trained {values['completions/trained'] / drawn:.0%}"
    if "budget/completions" in values:
      trained = (
        f"trained {values['budget/completions']:.0%} of nonzero advantages, "
        f"predicted {values['budget/predicted_speedup']:.1f}x faster, "
        f"noise scale {runs.noise_scale([values])}"
      )
    self.writer.bar.advance(
      done,
      f"sampled accuracy {statistics.with_interval(accuracy, digits=2)}",
      trained,
      f"{values['step/seconds']:.2f} s/step",
    )
    return is_ended

  def _save(self, step: int, state: TrainState) -> None:
    with distributed.sharing_errors():
      self.writer.sync()
    self.checkpoints.save(step, state)
    if bucket.url(self.workdir):
      with distributed.sharing_errors():
        self.checkpoints.wait()
      if problem := bucket.upload_from_all(self.workdir):
        if step == 0 and distributed.count() > 1:  # others may need its parts
          raise Unreachable(problem)
        self.writer.say(f"warning: {problem}. The next checkpoint tries again")

  def _evaluate(self, state: TrainState, is_end: bool) -> bool:
    """Writes the accuracy on every evaluation set, and some answers.

    At both ends of a run, greedy completions are evaluated too. Returns True if
    the state is the best so far, by `checkpoint.best`.
    """
    step, sets = int(state.step), self.run.eval_sets
    samples = self.run.config.eval.samples
    values = {"eval/samples": samples} if sets else {}
    for number, name in enumerate(sets):
      completions = self._complete(state, name, "evaluate")
      stage = eval_sets.stage(number, name)
      new = completions.metrics()
      if samples and is_end:
        greedy = self._complete(state, name, "evaluate_greedy").metrics()
        new |= {f"greedy_{x}": greedy[x] for x in eval_sets.ACCURACY}
      values |= {f"{stage}/{x}": value for x, value in new.items()}
      accuracies = runs.accuracies(values, stage).items()
      accuracies = (f"{x} {statistics.with_interval(y)}" for x, y in accuracies)
      with distributed.sharing_errors():
        self.writer.write_samples(step, stage, completions.samples[:8])
        self.writer.say(
          f"step {step}: {name if len(sets) > 1 else 'held-out'} accuracy "
          f"({new['problems']:,} problems x {max(samples, 1)}): "
          f"{', '.join(accuracies)}, length {new['tokens']:.1f} tokens"
        )
    with distributed.sharing_errors():
      if values:
        self.writer.write(step, values)
    self.evaluation = values
    return self.checkpoints.is_best(step, values)

  def _complete(
    self, state: TrainState, name: str, program: str
  ) -> eval_sets.Completions:
    """Returns completions of an evaluation set by a compiled program."""
    with self.writer.bar.task(f"evaluating on {name}"):
      roll_out = functools.partial(self.compiled[program], params=state.params)
      return eval_sets.evaluate(self.run, name, roll_out, self.grader)


def call(
  callback: Callback, values: dict[str, float], *args
) -> dict[str, float]:
  """Returns a step's metrics and a callback's, which must have other names."""
  more = callback(*args) or {}
  for name in more:
    is_ours = name == "step" or name in values
    if is_ours or name.startswith(("eval/", "warnings/")):
      raise UserError(
        f"config.callbacks: a function returned the metric {name!r}, which the "
        "run writes itself: choose another name"
      )
  return values | more


def _is_due(done: int, every: int) -> bool:
  return every > 0 and done % every == 0
