"""One training step, room by room.

harvest (draw -> choose prompts -> roll out -> grade -> remember) -> select
  (advantages, completions, weights, packing) -> score (tokens) -> update
"""

from collections.abc import Callable, Iterator
import contextlib
import dataclasses
import functools
import pathlib
import signal

import jax
from jax import block_until_ready as ready
import numpy as np

from dppo_jax import (
  checkpoint,
  collect,
  data,
  evaluate,
  keys,
  metrics,
  report,
  resume,
  rewards,
  rooms,
  update,
  warmup,
)
from dppo_jax import config as configs
from dppo_jax.house import House, furnish
from dppo_jax.keys import Room
from dppo_jax.models import transformer
from dppo_jax.records import TrainState

SAMPLES_PER_STEP = 2  # completions of each step in samples.jsonl


def run(config: configs.Config, workdir: pathlib.Path) -> None:
  """Trains in `workdir`, going on from its newest checkpoint if it has one.

  Raises:
    ValueError: for a config, data or checkpoint that cannot work.
    FloatingPointError: where the gradient stays non-finite.
  """
  house = furnish(config)
  resume.write(workdir / "config.json", config)
  with (
    jax.set_mesh(house.mesh),
    house.make_grader() as grader,
    checkpoint.Checkpoints(workdir, config.checkpoint.keep) as saved,
    metrics.Writer(workdir, saved.latest_step(), config.steps) as writer,
  ):
    writer.say(house.description())
    grader.self_check()
    _train(house, grader, saved, writer)
  print(f"report: {report.write(workdir)}", flush=True)


def _train(
  house: House,
  grader: rewards.Grader,
  saved: checkpoint.Checkpoints,
  writer: metrics.Writer,
) -> None:
  config = house.config
  num_prompts = config.data.prompts_per_step
  compiled = rooms.build(house)
  test = functools.partial(_test, house, compiled, grader, writer)
  state, reference = _begin(house, saved, writer, test)
  # The first draw shuffles the epoch, which compiles; no later one does.
  data.draw(house.train, house.root_key, 0, num_prompts)
  compiles = metrics.Compilations()

  with _stop_signal() as is_stopping:
    for step in range(int(state.step), config.steps):
      at = functools.partial(keys.draw_at, house.root_key, step)
      clock = metrics.Clock()
      state, got = collect.harvest(house, compiled, grader, state, clock)
      with clock("select"):
        batch, num_micro, chosen = ready(
          compiled.select(
            at(Room.COMPLETIONS), got.prompts, got.rollout, got.rewards
          )
        )
      with clock("score"):
        batch, refined = ready(
          compiled.score(state.params, at(Room.TOKENS), batch, num_micro)
        )
      with clock("update"):
        num_drawn = np.float32(got.num_prompts) * config.rollout.group_size
        state, learned = ready(
          compiled.update(state, reference, batch, num_micro, num_drawn)
        )

      done = step + 1
      values = jax.device_get(got.metrics | chosen | refined | learned)
      values |= clock.metrics() | {"update/compiles": compiles.since_last()}
      writer.write(done, values)
      writer.write_samples(done, got.samples[:SAMPLES_PER_STEP])
      writer.progress(done, values)
      _check(values)
      ends = done == config.steps
      if ends or _is_due(done, config.eval.every):
        test(state)
      stops = is_stopping()
      if ends or stops or _is_due(done, config.checkpoint.every):
        saved.save(done, state)
      if stops and not ends:
        writer.say(f"stopped after step {done}; the same command goes on")
        raise KeyboardInterrupt


def _begin(
  house: House,
  saved: checkpoint.Checkpoints,
  writer: metrics.Writer,
  test: Callable[[TrainState], None],
) -> tuple[TrainState, TrainState | None]:
  """The state to go on from, and the reference policy's weights."""
  like = rooms.state_like(house)
  first = saved.latest_step()
  if first is None:
    params = _warm_up(house, like.params, writer)
    state = jax.jit(
      functools.partial(rooms.fresh_state, house),
      out_shardings=jax.tree.map(lambda x: x.sharding, like),
      donate_argnums=0,
    )(params)
    test(state)
    saved.save(0, state)
  else:
    writer.say(f"going on after step {first}")
    state = saved.restore(first, like)
  reference = None
  if house.objective.beta:
    saved.wait()
    reference = saved.restore_params(0, like.params)
  return state, reference


def _warm_up(
  house: House, like: transformer.Params, writer: metrics.Writer
) -> transformer.Params:
  """The weights after the supervised steps that the config asks for, if any.

  Args:
    like: shapes and placements of the weights.
  """
  knobs = dataclasses.asdict(house.config.warmup)
  from_run = knobs.pop("from_run")
  if from_run:
    writer.say(f"the first weights of {from_run}")
    with checkpoint.Checkpoints(
      pathlib.Path(from_run), keep=1, read_only=True
    ) as other:
      return other.restore_params(0, like)
  params = house.initial_params()
  if not knobs["steps"]:
    return params
  return warmup.run(
    params,
    house.train,
    house.tokenizer,
    house.stop_ids[0],
    house.root_key,
    model_config=house.model,
    rows=house.rows,
    head_tokens=house.config.pack.head_tokens,
    say=writer.say,
    **knobs,
  )


def _test(
  house: House,
  compiled: rooms.Rooms,
  grader: rewards.Grader,
  writer: metrics.Writer,
  state: TrainState,
) -> None:
  """Writes the accuracy on held-out problems, if any, and some answers."""
  if not house.held_out:
    return
  step = int(state.step)
  values, answers = evaluate.evaluate(
    functools.partial(compiled.evaluate, state.params),
    house.held_out,
    house.tokenizer,
    grader,
    keys.draw_at(house.root_key, 0, Room.EVALUATE),
    house.config.eval.prompts,
  )
  writer.write(step, values)
  writer.write_samples(
    step, [collect.sample(*x) | {"held_out": True} for x in answers[:8]]
  )
  writer.say(
    f"step {step}: held-out accuracy {values['eval/accuracy']:.3f}"
    f" ± {values['eval/stderr']:.3f}"
    f" ({values['eval/tokens']:.1f} tokens a completion)"
  )


def _check(values: dict[str, float]) -> None:
  """Refuses to go on where going on would be in vain."""
  if values["pack/missing_rows"] > 0:
    raise RuntimeError(
      f"{values['pack/missing_rows']:.0f} packed rows have no place: "
      "packing.row_bound is wrong; please report this"
    )
  if values["update/skipped_in_a_row"] >= update.MAX_SKIPPED:
    raise FloatingPointError(
      f"the gradient of {update.MAX_SKIPPED} updates in a row was not finite "
      f"(norm {values['update/grad_norm']}, loss {values['update/loss']}, "
      f"largest weight {values['weights/max']:.1f}): nothing was changed by "
      "them. Lower config.optimizer.learning_rate, or compute in float32 "
      "with config.model.dtype"
    )


def _is_due(step: int, every: int) -> bool:
  return every > 0 and step % every == 0


@contextlib.contextmanager
def _stop_signal() -> Iterator[Callable[[], bool]]:
  """Turns the first SIGTERM or Ctrl-C into a wish to stop after this step."""
  asked = []
  signals = (signal.SIGTERM, signal.SIGINT)

  def ask(number, frame):
    asked.append(number)
    signal.signal(number, before[number])

  before = {number: signal.signal(number, ask) for number in signals}
  try:
    yield lambda: bool(asked)
  finally:
    for number in signals:
      signal.signal(number, before[number])
