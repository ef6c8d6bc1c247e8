"""The training loop: steps, evaluation, checkpoints, stopping.

A step, stage by stage:

collect (draw -> choose prompts -> roll out -> grade -> update history)
  -> select (advantages, completions, weights, packing) -> score (old
  log-probabilities, tokens) -> update
"""

from collections.abc import Callable, Iterator
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
from dppo_jax import data, rewards, shapes, sharding
from dppo_jax.config.options import flatten
from dppo_jax.eval import sets as eval_sets
from dppo_jax.methods.neyman.step_costs import Costs, of_step
from dppo_jax.metrics import live_report, logs, progress, samples, trackers
from dppo_jax.metrics import warnings as health
from dppo_jax.metrics import writer as metrics
from dppo_jax.models import transformer
from dppo_jax.records import TrainState
from dppo_jax.rng import Stage, rng_at
from dppo_jax.run import checkpoint, distributed, fingerprints, runtime_checks
from dppo_jax.run import workdir as resume
from dppo_jax.run.setup import Run, setup_run
from dppo_jax.step import programs, sft
from dppo_jax.step.collect import collect
from dppo_jax.step.grade import with_texts


def run(config: configs.Config, workdir: pathlib.Path) -> None:
  """Trains in `workdir`, going on from its newest checkpoint if it has one.

  Raises:
    ValueError: for a config, data or checkpoint that cannot work.
    FloatingPointError: where the gradient stays non-finite.
  """
  logs.quiet_libraries()
  logs.keep_programs()
  resume.check_processes(config, workdir)
  if resume.is_done(config, workdir):
    return
  with progress.Progress(is_silent=not distributed.is_first()) as bar:
    with bar.task("reading data and model"), distributed.sharing_errors():
      trackers.check(config.log.writers)
      run = setup_run(config)
    with (
      resume.held(
        workdir / "config.json",
        config,
        fingerprints.of_run(config, run.train_set),
      ),
      jax.set_mesh(run.mesh),
      run.make_grader() as grader,
      checkpoint.Checkpoints(
        workdir, **dataclasses.asdict(config.checkpoint)
      ) as checkpoints,
    ):
      # Before the writer, which drops what is newer than the newest sound one.
      damaged = checkpoints.recover()
      with _open_writer(config, workdir, checkpoints, bar) as writer:
        for line in damaged:
          writer.say(line)
        _train_and_report(run, grader, checkpoints, writer, workdir)


def _train_and_report(
  run: Run,
  grader: rewards.Grader,
  checkpoints: checkpoint.Checkpoints,
  writer: metrics.Writer,
  workdir: pathlib.Path,
) -> None:
  """The run from its first line to its report; what fails is logged."""
  try:
    writer.say(run.description())
    with writer.bar.task("starting to grade"), distributed.sharing_errors():
      grader.self_check(run.train_set.columns)
    page = live_report.LiveReport(workdir, writer)
    _train(run, grader, checkpoints, writer, page)
    with writer.bar.task("writing the report"), distributed.sharing_errors():
      if distributed.is_first():
        writer.say(f"report: {page.write(run.config.steps)}")
  except KeyboardInterrupt:
    if checkpoints.latest_step() is None:
      writer.say("stopped with nothing saved: the same command starts anew")
    raise
  except Exception:
    writer.log(traceback.format_exc())
    raise


def _open_writer(
  config: configs.Config,
  workdir: pathlib.Path,
  checkpoints: checkpoint.Checkpoints,
  bar: progress.Progress,
) -> metrics.Writer | metrics.Silent:
  """What the run writes goes here; one process writes it."""
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
  page: live_report.LiveReport,
) -> None:
  config = run.config
  num_prompts = config.data.prompts_per_step
  with writer.bar.task("compiling") as task:
    compiled_step = programs.compile_step(run, task)
  evaluate_now = functools.partial(
    _evaluate, run, compiled_step, grader, writer
  )
  state, reference = _begin(run, checkpoints, writer, evaluate_now)
  # The first draw shuffles the epoch, which compiles; no later one does.
  data.draw(run.train_set, run.root_key, 0, num_prompts)

  first = int(state.step)
  costs = Costs(run.packing.rows_per_micro)
  with (
    metrics.Compilations() as compilations,
    distributed.stop_signal() as is_stopping,
    _unwalked_heap(),
    writer.bar.steps("step", config.steps, first) as shown,
  ):
    for step in range(first, config.steps):
      rng_of = functools.partial(rng_at, run.root_key, step)
      clock = metrics.Clock()
      measured = costs.measured(state) if run.method.reads_measured else None
      state, got = collect(run, compiled_step, grader, state, clock, measured)
      with clock("select"):
        batch, num_micro, selected, outcome = jax.block_until_ready(
          compiled_step.select(
            rng_of(Stage.COMPLETIONS)._replace(measured=measured),
            *(got.prompts, got.rollout, got.rewards),
          )
        )
        runtime_checks.check_selection(jax.device_get(selected))
      with clock("score"):
        batch, scored = jax.block_until_ready(
          compiled_step.score(
            state.params, rng_of(Stage.TOKENS), batch, num_micro
          )
        )
        runtime_checks.check_selection(jax.device_get(scored))
      with clock("update"):
        denominator = np.float32(got.num_prompts) * config.rollout.group_size
        state, updated = jax.block_until_ready(
          compiled_step.update(state, reference, batch, num_micro, denominator)
        )

      done = step + 1
      values = jax.device_get(got.metrics | selected | scored | updated)
      values |= _about_rate(run, done, values) | clock.metrics()
      values |= {"update/compiles": compilations.since_last()}
      outcome = jax.device_get(outcome)
      chosen = with_texts(
        samples.of_step(
          got.samples, outcome.lengths, outcome.advantages, outcome.weights
        )
      )
      news = itertools.chain(*distributed.gather(grader.news()))
      if run.method.reads_measured:  # all processes by the clock of the first
        costs.add(distributed.gather(of_step(values))[0])
      with distributed.sharing_errors():
        writer.write(done, values)
        writer.write_samples(done, "train", chosen)
        for line in dict.fromkeys(news):
          writer.say(line)
      shown.advance(done, *_note(values))
      runtime_checks.check_update(done, values)
      is_last = done == config.steps
      if is_last or _is_due(done, config.eval.every):
        evaluate_now(state)
        with distributed.sharing_errors():
          if distributed.is_first():
            page.refresh(done)
      stops = is_stopping()
      if is_last or stops or checkpoints.is_due(done):
        with distributed.sharing_errors():
          writer.sync()
        checkpoints.save(done, state)
      if stops and not is_last:
        writer.say(f"stopped after step {done}; the same command goes on")
        raise KeyboardInterrupt


@contextlib.contextmanager
def _unwalked_heap() -> Iterator[None]:
  """Garbage collections leave out what was there before.

  That is mostly what jax has traced, and 0.3 s of one step in a hundred.
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
  evaluate_now: Callable[[TrainState], None],
) -> tuple[TrainState, TrainState | None]:
  """The state to go on from, and the reference policy's weights."""
  abstract = programs.abstract_train_state(run)
  latest = checkpoints.latest_step()
  if latest is None:
    params = _first_params(run, abstract.params, writer)
    state = jax.jit(
      functools.partial(programs.init_train_state, run),
      out_shardings=jax.tree.map(lambda x: x.sharding, abstract),
      donate_argnums=0,
    )(params)
    runtime_checks.check_params(
      state.params,
      "lower config.sft.steps"
      if run.config.sft.needs_solutions
      else "config.model and config.sft.from_run say where they are from",
    )
    evaluate_now(state)
    with distributed.sharing_errors():
      writer.sync()
    checkpoints.save(0, state)
  else:
    writer.say(f"going on after step {latest}")
    with writer.bar.task("reading the checkpoint"):
      state = checkpoints.restore(latest, abstract)
    runtime_checks.check_params(
      state.params,
      f"delete the checkpoint of step {latest}, and the run goes on from the "
      "one before",
    )
  reference = None
  if run.objective.beta:
    checkpoints.wait()
    reference = checkpoints.restore_params(0, abstract.params)
  return state, reference


def _first_params(
  run: Run, abstract: transformer.Params, writer: metrics.Writer
) -> transformer.Params:
  """The weights after the supervised steps that the config asks for, if any.

  Args:
    abstract: shapes and shardings of the weights.
  """
  options = dataclasses.asdict(run.config.sft)
  from_run = options.pop("from_run")
  if from_run:
    workdir, step = checkpoint.split_step(from_run)
    writer.say(f"the weights of {workdir} after step {step}")
    with checkpoint.Checkpoints(workdir, read_only=True) as other:
      return other.restore_params(step, abstract)
  model = run.config.model
  source = "reading the" if model.path or model.hub_id else "making the first"
  with writer.bar.task(f"{source} weights"):
    params = jax.block_until_ready(run.initial_params())
  if not options["steps"]:
    return params
  return sft.run(
    params,
    run.train_set,
    run.tokenizer,
    run.stop_ids[0],
    run.root_key,
    model_config=run.model,
    spec=run.packing,
    direct_share=sft.ARITHMETIC_DIRECT_SHARE
    if run.config.data.train == "arithmetic"
    else 0.0,
    say=writer.say,
    bar=writer.bar,
    **options,
  )


def _evaluate(
  run: Run,
  compiled_step: programs.CompiledStep,
  grader: rewards.Grader,
  writer: metrics.Writer,
  state: TrainState,
) -> None:
  """Writes the accuracy on every evaluation set, and some answers."""
  step, values = int(state.step), {}
  for number, (name, problems) in enumerate(run.eval_sets.items()):
    with writer.bar.task(f"evaluating on {name}"):
      found = eval_sets.evaluate(
        functools.partial(compiled_step.evaluate, state.params),
        problems,
        run.tokenizer,
        grader,
        eval_sets.rng_of_set(run.root_key, name, number),
        shapes.round_up(
          run.config.eval.prompts, sharding.num_shards(run.mesh, "batch")
        ),
      )
    # The first set's go by names of their own, whatever it is called.
    stage = f"eval/{name}" if number else "eval"
    new = {f"{stage}/{x}": value for x, value in found.metrics().items()}
    values |= new
    with distributed.sharing_errors():
      writer.write_samples(step, stage, found.samples[:8])
      writer.say(
        f"step {step}: {f'{name} ' if len(run.eval_sets) > 1 else 'held-out '}"
        f"accuracy {new[f'{stage}/accuracy']:.3f}"
        f" ± {new[f'{stage}/stderr']:.3f}"
        f" ({new[f'{stage}/tokens']:.1f} tokens a completion)"
      )
  with distributed.sharing_errors():
    if values:
      writer.write(step, values)


def _about_rate(
  run: Run, done: int, values: dict[str, float]
) -> dict[str, float]:
  """With what learning rate the last update went, and whether it was clipped.

  Args:
    done: steps, each of as many updates as the config says.
  """
  updates = done * run.config.objective.num_updates
  applied = int(updates - values["update/skipped"])
  norm = values["update/grad_norm"]
  return {
    "update/learning_rate": float(run.learning_rate(max(applied - 1, 0))),
    "update/clipped_norm": float(norm >= run.config.optimizer.clip_norm),
  }


def _note(values: dict[str, float]) -> Iterator[str]:
  """What matters most of a step, in a few words each."""
  trained = values["completions/trained"] / max(values["completions/drawn"], 1)
  yield f"sampled accuracy {values['reward/accuracy']:.2f}"
  if "shares/completions" in values:  # which set itself
    yield (
      f"trains {values['shares/completions']:.0%} of what is needed, predicted "
      f"{values['shares/completions_speedup']:.1f} times as fast"
    )
  else:
    yield f"trained {trained:.0%}"
  yield f"{values['step/seconds']:.2f} s/step"
  if values["update/skipped"]:
    yield f"{values['update/skipped']:.0f} updates skipped"


def _is_due(step: int, every: int) -> bool:
  return every > 0 and step % every == 0
