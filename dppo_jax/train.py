"""The training loop, and what follows each step: logs, checks, checkpoints."""

from collections.abc import Callable, Sequence
import contextlib
import dataclasses
import gc
import itertools
import pathlib
import time
import traceback
from typing import Any

import jax
import numpy as np

from dppo_jax import config as configs
from dppo_jax import data, distributed, rewards
from dppo_jax.analysis import runs, statistics
from dppo_jax.errors import StopTraining, UserError
from dppo_jax.eval import estimators, eval_sets
from dppo_jax.files import bucket, user_code
from dppo_jax.metrics import health, progress, report, samples
from dppo_jax.metrics.writer import Silent, Writer
from dppo_jax.planning import memory
from dppo_jax.records import TrainState
from dppo_jax.rng import rng_at
from dppo_jax.run import (
  checkpoint,
  checkpoint_steps,
  compile_cache,
  resume,
  sft,
  signals,
)
from dppo_jax.run.description import description
from dppo_jax.run.setup import Run, setup_run
from dppo_jax.step import abstract_values, programs, runtime_checks
from dppo_jax.step.step_info import StepInfo
from dppo_jax.step.train_step import TrainStep

_SAVE_SECONDS = 900  # between checkpoints if config.checkpoint.every is 0

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
    UserError: for invalid config, data or checkpoints, weights that are not
      finite, or ten such gradients in a row.
  """
  config, workdir = configs.absolute_paths(config), workdir.absolute()
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
  with progress.Progress() as bar:
    with bar.task("reading data and model"):
      begins = not checkpoint_steps.complete_steps(workdir)
      run = memory.choose_slots(setup_run(config, begins=begins))
      with distributed.sharing_errors():
        memory.check(run)
        eval_sets.check_metric(run, config.checkpoint.best)
    kept = config.checkpoint
    prints = resume.fingerprints(config, run.train_set, run.eval_sets)
    with (
      resume.held(workdir, config, prints, allow_change),
      jax.set_mesh(run.spec.mesh),
      run.make_grader() as grader,
      checkpoint.Checkpoints(workdir, kept.keep, kept.best) as checkpoints,
      contextlib.ExitStack() as stack,
    ):
      # Before the writer, which drops lines after the latest intact checkpoint.
      warnings = checkpoints.recover()
      latest = checkpoints.latest_step()
      with distributed.sharing_errors():
        writer: Writer | Silent = Silent(bar)
        changes: list[str] = []
        if distributed.is_first():
          changes = resume.write(workdir, config, prints, allow_change)
          advice = run.spec.method.prune_less
          watch = health.Health(run.spec.num_updates, advice)
          trackers, options = config.log.writers, configs.flatten(config)
          writer = stack.enter_context(
            Writer(workdir, latest, bar, watch, trackers, options)
          )
      try:
        described = description(run, config)
        for line in (*warnings, *changes, described):
          writer.say(line)
        with bar.task("starting to grade"), distributed.sharing_errors():
          grader.self_check(run.train_set.columns)
          for problems in run.eval_sets.values():
            grader.self_check(problems.columns, verifier_only=True)
        with bar.task("compiling") as task:
          compiled = _compile(run, task)
        stack.callback(gc.unfreeze)
        stack.callback(stop.defer)  # while the last checkpoint is written
        session = _Session(
          workdir,
          config,
          run,
          compiled,
          grader,
          checkpoints,
          writer,
          stop,
          callbacks,
        )
        _train(session)
        with bar.task("writing the report"), distributed.sharing_errors():
          if distributed.is_first():
            writer.say(
              f"report: {bucket.shown(report.write(workdir, session.ended_by))}"
            )
            writer.say(report.headline(runs.load(workdir)))
            writer.say(resume.next_commands(workdir))
      except Exception:
        writer.log(traceback.format_exc())
        raise


def _compile(run: Run, task: progress.Task) -> dict[str, jax.stages.Compiled]:
  """Compiles the stages of a step, and evaluations if there are problems."""
  table = programs.step_programs(run.spec)
  if run.eval_sets:
    table["evaluate"] = eval_sets.program(run, run.eval_samples)
    if run.eval_samples:  # the first and the last evaluation are greedy too
      table["evaluate_greedy"] = eval_sets.program(run, samples=0)
  return programs.compile_programs(table, task)


def _train(session: "_Session") -> None:
  """Trains to the last step; `session` keeps the logs and checkpoints."""
  run, root_key = session.run, session.run.spec.root_key
  train_step = TrainStep(
    run.spec, run.train_set, run.tokenizer, session.grader, session.compiled
  )
  state = session.begin()
  reference = None
  if run.spec.has_reference:
    session.checkpoints.wait()
    like = abstract_values.abstract_params(run.spec)
    reference = session.checkpoints.restore_params(0, like)
  # The first draw shuffles the epoch, which compiles; no later one does.
  data.draw(run.train_set, root_key, 0, run.spec.num_prompts)
  first = int(state.step)
  # Excludes what exists, mostly jax traces, from garbage collections: walking
  # it stalls one step in a hundred for 0.3 s.
  gc.freeze()
  session.stop.defer()  # to the end of a step, and until the report is written
  with (
    compile_cache.compilations() as compilations,
    session.writer.bar.steps("step", session.config.steps, first),
  ):
    for step in range(first, session.config.steps):  # see `TrainStep`
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
  """A run with its open files, and what follows each step.

  Attributes:
    ended_by: callback that has ended the run, and its reason; empty if none.
  """

  workdir: pathlib.Path
  config: configs.Config
  run: Run
  compiled: dict[str, jax.stages.Compiled]
  grader: rewards.Grader
  checkpoints: checkpoint.Checkpoints
  writer: Writer | Silent
  stop: signals.StopRequest
  callbacks: Sequence[Callback]
  ended_by: str = ""
  evaluation: dict[str, float] = dataclasses.field(default_factory=dict)
  saved: float = dataclasses.field(default_factory=time.monotonic)

  def begin(self) -> TrainState:
    """Makes, evaluates and saves a first state, or restores the latest one."""
    latest = self.checkpoints.latest_step()
    if latest is not None:
      self.evaluation = resume.last_evaluation(self.workdir)
      self.writer.say(f"resuming after step {latest}")
      with self.writer.bar.task("reading the checkpoint"):
        like = abstract_values.abstract_train_state(self.run.spec)
        state = self.checkpoints.restore(latest, like)
      advice = f"delete the checkpoint of step {latest} to resume from the one"
      runtime_checks.check_params(state.params, f"{advice} before")
      return state
    state = sft.first_state(self.run, self.config.sft, self.writer)
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
    values = info.metrics(self.grader.specs)
    values["update/compiles"] = num_compiled
    self._log(done, state, info, values)
    runtime_checks.check_update(done, values)
    config = self.config
    self.ended_by = next(filter(None, distributed.gather(self.ended_by)), "")
    if self.ended_by:
      self.writer.say(self.ended_by)
    is_last = bool(self.ended_by) or done == config.steps
    is_best = False
    if is_last or _is_due(done, config.eval.every):
      is_best = self._evaluate(state, is_end=is_last)
    every = config.checkpoint.every
    is_late = not every and time.monotonic() - self.saved > _SAVE_SECONDS
    signs = distributed.gather((self.stop.is_requested, is_late))
    stops, is_late = map(any, zip(*signs, strict=True))
    if is_last or stops or is_best or is_late or _is_due(done, every):
      self._save(done, state)
    if stops and not is_last:
      raise KeyboardInterrupt
    return bool(self.ended_by)

  def _log(
    self, done: int, state: TrainState, info: StepInfo, values: dict[str, Any]
  ) -> None:
    """Writes the metrics and samples of a step, and calls the callbacks."""
    with distributed.sharing_errors():
      for callback in self.callbacks:
        try:
          values = call(callback, values, done, info, state)
        except StopTraining as reason:
          name = getattr(callback, "__qualname__", repr(callback))
          self.ended_by = f"{name} ended the run after step {done}"
          self.ended_by += f": {reason}" * bool(str(reason))
    x = info.summary
    groups = samples.with_outcomes(
      info.experience.samples, x.advantages, x.weights
    )
    with distributed.sharing_errors():
      self.writer.write(done, values)
      self.writer.write_samples(done, "train", samples.choose(groups))
      self.writer.write_completions(done, itertools.chain(*groups))
    self._say_warnings()
    drawn = max(values["completions/drawn"], 1)
    solved = [np.mean([x["correct"] for x in group]) for group in groups]
    accuracy = estimators.interval(np.array(solved), self.run.spec.group_size)
    trained = f"trained {values['completions/trained'] / drawn:.0%}"
    if "budget/completions" in values:
      trained = (
        f"trained {values['budget/completions']:.0%} of what is needed, "
        f"noise scale {runs.noise_scale([values])}"
      )
    self.writer.bar.advance(
      done,
      f"sampled accuracy {statistics.with_interval(accuracy, digits=2)}",
      trained,
      f"{values['step/seconds']:.2f} s/step",
    )

  def _say_warnings(self) -> None:
    warnings = distributed.gather(self.grader.pop_warnings())
    with distributed.sharing_errors():
      for line in dict.fromkeys(itertools.chain(*warnings)):
        self.writer.say(line)

  def _save(self, step: int, state: TrainState) -> None:
    with distributed.sharing_errors():
      self.writer.sync()
      if distributed.is_first():
        bucket.send(self.workdir)  # before the checkpoint that it belongs to
    self.checkpoints.save(step, state)
    self.saved = time.monotonic()

  def _evaluate(self, state: TrainState, is_end: bool) -> bool:
    """Writes the accuracy on every evaluation set, and some answers.

    At both ends of a run, greedy completions are evaluated too. Returns True if
    the state is the best so far, by `checkpoint.best`.
    """
    step, sets = int(state.step), self.run.eval_sets
    samples = self.run.eval_samples
    values: dict[str, float] = {"eval/samples": samples} if sets else {}
    for number, name in enumerate(sets):
      completions = self._complete(state, name, "evaluate")
      prefix = eval_sets.prefix(number, name)
      new = completions.metrics()
      if samples and is_end:
        greedy = self._complete(state, name, "evaluate_greedy").metrics()
        new |= {f"greedy_{x}": greedy[x] for x in eval_sets.ACCURACY}
      values |= {f"{prefix}/{x}": value for x, value in new.items()}
      accuracies = ", ".join(
        f"{x} {statistics.with_interval(y)}"
        for x, y in runs.accuracies(values, prefix).items()
      )
      with distributed.sharing_errors():
        self.writer.write_samples(step, prefix, completions.samples[:8])
        self.writer.say(
          f"step {step}: {name if len(sets) > 1 else 'held-out'} accuracy "
          f"({new['problems']:,} problems x {max(samples, 1)}): "
          f"{accuracies}, length {new['tokens']:.1f} tokens"
        )
    with distributed.sharing_errors():
      if values:
        self.writer.write(step, values)
    self._say_warnings()
    self.evaluation = {name: float(x) for name, x in values.items()}
    return self.checkpoints.is_best(step, values)

  def _complete(
    self, state: TrainState, name: str, program: str
  ) -> eval_sets.Completions:
    """Returns completions of an evaluation set by a compiled program."""
    with self.writer.bar.task(f"evaluating on {name}"):
      return eval_sets.evaluate(
        self.run, name, self.compiled[program], state.params, self.grader
      )


def call(
  callback: Callback, values: dict[str, float], *args
) -> dict[str, float]:
  """Returns a step's metrics and a callback's, which must have other names."""
  result = callback(*args)
  more = {}
  label = "config.callbacks: a function must return None or a dict of numbers"
  with user_code.explained(f"{label} by name"):
    for name, value in () if result in (None, False) else result.items():
      more[name] = float(value)
      is_ours = name == "step" or name in values
      if is_ours or str.startswith(name, ("eval/", "warnings/")):
        raise UserError(
          f"config.callbacks: a function returned the metric {name!r}, which "
          "the run writes itself: choose another name"
        )
  return values | more


def _is_due(done: int, every: int) -> bool:
  return every > 0 and done % every == 0
