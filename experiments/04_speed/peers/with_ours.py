"""The work done by dppo_jax, its main program as it is."""

import functools
import json
import pathlib
import shutil
import sys

import jax
import numpy as np

from dppo_jax import data, main, rollout
from dppo_jax.files import user_code
from dppo_jax.metrics import writer
from dppo_jax.records import PromptBatch, Rollout, Selection
from dppo_jax.rng import Stage, rng_at
from dppo_jax.run import setup
from dppo_jax.step import abstract_values, programs, train_step, update

from . import clock, work

CONFIG = pathlib.Path(__file__).parent / "config.py"


def options(args) -> dict[str, object]:
  """Returns options that differ from the config file, by dotted name.

  `args.micro` is a micro-batch of a device: rows x tokens, as in 2x448.
  """
  rows, _, length = args.micro.partition("x")
  shape = {"pack.rows_per_micro": int(rows), "pack.row_length": int(length)}
  return {
    "seed": args.seed,
    "steps": args.steps,
    "model.path": str(args.work / "checkpoint"),
    "data.train": str(args.work / "problems.jsonl"),
    "mesh.data": -1,
    **shape,
  }


def set_up(args) -> setup.Run:
  """The run that the main program would set up."""
  config = user_code.load(f"{CONFIG}:get_config")(args.method)
  for name, value in options(args).items():
    *sections, field = name.split(".")
    setattr(functools.reduce(getattr, sections, config), field, value)
  return setup.setup_run(config)


def order(args) -> None:
  """Writes the problems that each step draws."""
  run = set_up(args)
  ids = [
    data.draw(run.train_set, run.spec.root_key, step, work.PROMPTS).ids.tolist()
    for step in range(args.steps)
  ]
  args.out.write_text(json.dumps(ids))


def steps(args) -> None:
  """Runs the main program; its metrics' writer stamps the ends of steps."""
  watch = clock.Clock(args.out)

  class Writer(writer.Writer):
    def write(self, step, values):
      super().write(step, values)
      if "step/seconds" in values:
        watch.add(
          rollout_seconds=values["rollout/seconds"],
          generated=values["tokens/generated"],
          trained=values["tokens/trained"],
        )
        watch.end()

  writer.Writer = Writer
  workdir = args.out.with_suffix("")
  shutil.rmtree(workdir, ignore_errors=True)
  sys.argv = [
    "dppo_jax.main",
    f"--config={CONFIG}:{args.method}",
    f"--workdir={workdir}",
    *(f"--config.{name}={value}" for name, value in options(args).items()),
  ]
  main.run()


def check(args) -> None:
  """Scores and updates on the packed rows that a step would train on."""
  run, sequences = set_up(args), work.sequences(args.work)
  shape = (work.PROMPTS, work.GROUP)
  tokens = np.array(work.padded(sequences["completions"], work.NEW), np.int32)
  prompts = first_prompts(run)
  # With one update on a rollout nothing depends on what the sampler says of the
  # tokens it drew: here it numbers them, to find them again in the rows.
  numbers = np.arange(tokens.size, dtype=np.float32)
  drawn = Rollout(
    prompt_ids=prompts.ids,
    tokens=tokens.reshape(*shape, -1),
    logprobs=numbers.reshape(*shape, -1),
    lengths=(tokens != work.PAD).sum(1, dtype=np.int32).reshape(shape),
    is_stopped=np.zeros(shape, bool),
    kept=Selection(
      np.ones(work.PROMPTS, bool), np.ones(work.PROMPTS, np.float32)
    ),
    slot_steps=np.float32(0),
  )
  rewards = np.array(sequences["rewards"], np.float32).reshape(shape)
  experience = train_step.Experience(
    prompts, drawn, rewards, np.float32(work.PROMPTS), counts={}, samples=[]
  )
  with jax.set_mesh(run.spec.mesh):
    step = train_step.TrainStep(
      run.spec, run.train_set, run.tokenizer, grader=None
    )
    abstract = abstract_values.abstract_train_state(run.spec)
    shardings = jax.tree.map(lambda x: x.sharding, abstract)
    start = functools.partial(abstract_values.init_train_state, run.spec)
    state = jax.jit(start, out_shardings=shardings)(run.initial_params())
    (batch,) = step.select(rng_at(run.spec.root_key, 0), experience, state)
    score = lambda params, *batch_args: update.score(
      params, *batch_args, spec=run.spec
    )
    stats = jax.jit(score)(state.params, batch.rows, batch.num_micro)
    is_trained = np.asarray(batch.rows.is_trained)
    place = np.asarray(batch.rows.old_logprobs)[is_trained].astype(int)
    logprobs = np.full(tokens.shape, np.nan)
    logprobs.ravel()[place] = np.asarray(stats.logprobs)[is_trained]
    _, (info,) = step.update(state, None, [batch])
  lengths = zip(prompts.tokens, prompts.lengths, strict=True)
  out = {
    "prompt_ids": [row[:n].tolist() for row, n in lengths],
    "logprobs": logprobs.tolist(),
    "norm": float(info["update/grad_norm"]),
  }
  args.out.write_text(json.dumps(out))


def decode(args) -> None:
  """Samples a batch whose completions all have NEW tokens."""
  run = set_up(args)
  spec = run.spec
  make = functools.partial(
    rollout.sample,
    model_config=run.spec.model,
    group_size=spec.group_size,
    max_tokens=spec.sampling.max_tokens,
    num_slots=spec.num_slots,
    stop_ids=(-1,),
  )
  with jax.set_mesh(run.spec.mesh):
    arguments = {
      "params": run.initial_params(),
      "prompts": first_prompts(run),
      "rng": rng_at(run.spec.root_key, 0, Stage.ROLLOUT),
    }
    options = programs.compiler_options("cpu")
    lowered = jax.jit(make, compiler_options=options).lower(**arguments)
    sample = lowered.compile()

    def generate():
      out = sample(**arguments)
      assert (np.asarray(out.lengths) == work.NEW).all()

    args.out.write_text(json.dumps(clock.repeat(generate)))


def first_prompts(run: setup.Run) -> PromptBatch:
  """Returns the prompts that are checked and decoded."""
  ids = np.arange(work.PROMPTS, dtype=np.int32)
  return PromptBatch(ids, run.train_set.tokens[ids], run.train_set.lengths[ids])


if __name__ == "__main__":
  work.main(__doc__, order, steps, check, decode)
