"""Each phase of a step, and how its cost scales with its input."""

from collections.abc import Iterator
import functools
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dppo_jax import methods, rewards
from dppo_jax.algo import objectives
from dppo_jax.models import parameters, transformer
from dppo_jax.planning import flops as flops_of
from dppo_jax.records import Selection, TrainState
from dppo_jax.rng import Stage, rng_at
from dppo_jax.rollout import Sampling
from dppo_jax.step import optimizer as optimizers
from dppo_jax.step import programs, select, update
from dppo_jax.step.spec import StepSpec

from . import baselines, hlo, machine
from . import work as works

Row = dict[str, Any]
METHODS = {
  "grpo": methods.grpo(),
  "dppo": methods.dppo(),
  "neyman": methods.neyman(0.75, 0.25),  # fixed budgets
}


class Update(NamedTuple):
  """A compiled update, and the state that it starts from."""

  run: Any
  compile_seconds: float
  temporary_bytes: int
  launches: dict[str, list[int]]


def phases(work: works.Work, repeats: int) -> Iterator[Row]:
  """Seconds of prefill, decode, grade, select, score and update.

  Model FLOPs do not count recomputation.
  """
  model = work.model
  params = random_params(work)
  prompts, kept = works.make_prompts(work), works.everything(work)
  prompt_tokens = float(prompts.lengths.sum())

  def fill_cache(params, prompts):
    params = parameters.to_inference_params(params, model)
    sizes = [prompts.tokens.shape[1]]
    return transformer.prefill(
      params, model, prompts.tokens, prompts.lengths, sizes
    )

  prefill = _timed(fill_cache, (params, prompts), repeats)
  flops = flops_of.forward(model, prompt_tokens)
  yield _row("prefill", prefill, prompt_tokens, flops)

  sample = compile_function(works.sampler(work), params, prompts, kept)
  seconds = machine.timed(lambda: sample(params, prompts, kept), repeats)
  rollout = sample(params, prompts, kept)
  generated = float(rollout.lengths.sum())
  decode = machine.Seconds(*(s - prefill.median for s in seconds))
  flops = flops_of.forward(model, generated, generated)
  yield _row("decode", decode, generated, flops) | {
    "bytes": _decode_bytes(work, prompts, rollout),
    "launches": launches(sample),
  }

  texts = [r"so it is \boxed{7}"] * rollout.lengths.size
  with rewards.Grader("exact") as grader:
    answers, problems = ["7"] * len(texts), [""] * len(texts)
    seconds = machine.timed(lambda: grader.grade(problems, texts, answers), 3)
  yield _row("grade", seconds, generated, 0.0)

  arguments = (prompts, rollout, works.make_rewards(work))
  choose = compile_function(
    functools.partial(select_batch, work=work, share=1.0), *arguments
  )
  seconds = machine.timed(lambda: choose(*arguments), repeats)
  yield _row("select, weight, pack", seconds, generated, 0.0)

  batch, num_micro, info = choose(*arguments)
  trained = float(info["tokens/trained"])
  in_rows = _tokens_in_rows(info, work)
  pairs = works.pairs(prompts, rollout)
  flops = flops_of.forward(model, in_rows, trained, pairs)
  spec = step_spec(work)
  score = compile_function(
    functools.partial(update.score, spec=spec), params, batch, num_micro
  )
  seconds = machine.timed(lambda: score(params, batch, num_micro), repeats)
  yield _row("score", seconds, trained, flops)

  learn = compile_update(work, params)
  seconds = machine.timed(lambda: learn.run(batch, num_micro), repeats)
  yield _row("update", seconds, trained, 3 * flops) | {
    "compile_seconds": learn.compile_seconds,
    "temporary_bytes": learn.temporary_bytes,
    "launches": learn.launches,
    "fill": float(info["pack/fill"]),
    "shared": float(info["pack/shared"]),
  }


def pruning(work: works.Work, repeats: int) -> Iterator[Row]:
  """Compares time and tokens of pruned steps with those of the unpruned."""
  params, prompts = random_params(work), works.make_prompts(work)
  rollout, reward = works.make_rollout(work), works.make_rewards(work)
  learn, whole = compile_update(work, params), None
  for share in (1.0, 0.5, 0.25):
    batch, num_micro, info = jax.jit(
      functools.partial(select_batch, work=work, share=share)
    )(prompts, rollout, reward)
    seconds = machine.timed(
      lambda b=batch, n=num_micro: learn.run(b, n), repeats
    )
    trained, in_rows = (
      float(info["tokens/trained"]),
      _tokens_in_rows(info, work),
    )
    whole = whole or (seconds.median, trained, in_rows)
    yield _ratio("update", share, seconds, trained, whole) | {
      "row_token_ratio": in_rows / whole[2]
    }
  learn = None  # frees its state
  yield from _rollouts(work, repeats)
  yield from _rollouts(work._replace(prompts=4 * work.prompts), repeats)


def _rollouts(work: works.Work, repeats: int) -> Iterator[Row]:
  params, prompts = random_params(work), works.make_prompts(work)
  everything = works.everything(work)
  sample = compile_function(works.sampler(work), params, prompts, everything)
  whole, waiting = None, work.prompts * work.group_size / work.slots
  for share in (1.0, 0.5, 0.25):
    keep = jnp.arange(work.prompts) < share * work.prompts
    kept = Selection(keep, jnp.full((work.prompts,), share, jnp.float32))
    seconds = machine.timed(lambda k=kept: sample(params, prompts, k), repeats)
    tokens = float(sample(params, prompts, kept).lengths.sum())
    whole = whole or (seconds.median, tokens)
    name = f"rollout, {share * waiting:g} completions a slot"
    yield _ratio(name, share, seconds, tokens, whole)


def sharing(work: works.Work, repeats: int) -> Iterator[Row]:
  """Update time with a prompt for each completion, and with one for all."""
  prompts, rollout = works.make_prompts(work), works.make_rollout(work)
  whole = None
  for shares in (False, True):
    other = work._replace(rows=work.rows._replace(share_prefix=shares))
    batch, num_micro, info = jax.jit(
      functools.partial(select_batch, work=other, share=1.0)
    )(prompts, rollout, works.make_rewards(work))
    in_rows = _tokens_in_rows(info, work)
    learn = compile_update(other, random_params(work))
    seconds = machine.timed(
      lambda b=batch, n=num_micro, f=learn: f.run(b, n), repeats
    )
    whole = whole or (seconds.median, in_rows)
    name = "update, shared prompts" if shares else "update, repeated prompts"
    yield _ratio(name, 1.0, seconds, in_rows, whole)


def selection(work: works.Work, repeats: int) -> Iterator[Row]:
  """Seconds to select, weight and pack 1,024 prompts of 16 completions."""
  large = work._replace(prompts=1024, group_size=16)
  arguments = (
    works.make_prompts(large),
    works.make_rollout(large),
    works.make_rewards(large),
  )
  for name in METHODS:
    choose = functools.partial(select_batch, work=large, method=name)
    seconds = _timed(choose, arguments, repeats)
    yield _row(f"select, {name}", seconds, float(arguments[1].lengths.sum()), 0)


def growth(work: works.Work, repeats: int) -> Iterator[Row]:
  """Seconds of sampling, selection and update over a factor of 16.

  Rows of each length hold the same completions, those of several micro-batches.
  """
  many = work._replace(prompts=8 * work.prompts)
  sizes = {
    "width": lambda x: works.with_model(
      work, embed=64 * x, mlp=192 * x, heads=2 * x, kv_heads=x, head_dim=32
    ),
    "row length": lambda x: many._replace(
      rows=work.rows._replace(row_length=256 * x, rows_per_micro=16 // x)
    ),
    "completions": lambda x: work._replace(group_size=4 * x),
    "prompts": lambda x: work._replace(prompts=4 * x),
  }
  for axis, resize in sizes.items():
    for factor in (1, 2, 4, 8, 16):
      here = resize(factor)
      by_name = {row["name"]: row for row in phases(here, repeats)}
      for name in ("decode", "select, weight, pack", "update"):
        yield {"axis": axis, "factor": factor, **by_name[name]}


def memory(work: works.Work) -> Iterator[Row]:
  """Temporary bytes of a compiled update; nothing is run."""
  for length in (1024, 4096, 16384):
    for vocab in (4096, 32768, 131072):
      here = works.with_model(work, vocab=vocab, remat="layers")
      here = here._replace(
        rows=work.rows._replace(row_length=length, rows_per_micro=1),
        logit_chunk=512,
      )
      learn = compile_update(
        here, jax.eval_shape(lambda h=here: random_params(h))
      )
      yield {
        "name": "update",
        "row_length": length,
        "vocab": vocab,
        "temporary_bytes": learn.temporary_bytes,
        # What the logits of a row alone would take, and their gradient.
        "logits_bytes": 2 * 4 * length * vocab,
      }


def compile_update(work: works.Work, params) -> Update:
  """Compiles the update of `params`, which its first run donates."""
  optimizer = optimizers.make_optimizer(1e-6, 1000)
  step = functools.partial(
    update.update, spec=step_spec(work, optimizer=optimizer)
  )

  def begin(params):
    zero = jnp.int32(0)
    return TrainState(zero, zero, params, optimizer.init(params), ())

  batch = jax.eval_shape(
    functools.partial(select_batch, work=work, share=1.0),
    works.make_prompts(work),
    works.make_rollout(work),
    works.make_rewards(work),
  )[0]
  state = jax.eval_shape(begin, params)
  shape = lambda dtype: jax.ShapeDtypeStruct((), dtype)
  start = time.perf_counter()
  options = programs.compiler_options(jax.devices()[0].platform)
  jitted = jax.jit(step, donate_argnums=(0,), compiler_options=options)
  compiled = jitted.lower(
    state, None, batch, shape(jnp.int32), shape(jnp.float32)
  ).compile()
  seconds = time.perf_counter() - start
  held = []

  def run(batch, num_micro):
    if not held:
      held.append(jax.jit(begin, donate_argnums=(0,))(params))
    denominator = jnp.float32(work.prompts * work.group_size)
    held[0], info = compiled(held[0], None, batch, num_micro, denominator)
    return held[0].step, info

  used = compiled.memory_analysis()
  temporary = used.temp_size_in_bytes if used else 0
  return Update(run, seconds, temporary, launches(compiled))


def select_batch(prompts, rollout, reward, *, work, share=None, method="grpo"):
  """Selects as a step does.

  Args:
    share: fraction of the completions to keep uniformly at random; None leaves
      the choice to the method.
  """
  chosen = METHODS[method]
  if share is not None:
    chosen = chosen._replace(
      completions=baselines.uniform(share), trains_zero_advantage=True
    )
  return select.select(
    rng_at(jax.random.key(0), 0, Stage.COMPLETIONS),
    prompts,
    rollout,
    reward,
    spec=step_spec(work, method=chosen),
  )[:3]


def _tokens_in_rows(info, work: works.Work) -> float:
  """Tokens in the rows, prompts included."""
  return float(info["pack/fill"] * info["pack/rows"]) * work.rows.row_length


def step_spec(work: works.Work, **fields) -> StepSpec:
  """The step of a work, for stages that read no mesh; of grpo by default."""
  usual = {
    "mesh": None,
    "platform": jax.devices()[0].platform,
    "root_key": None,
    "model": work.model,
    "method": METHODS["grpo"],
    "objective": objectives.grpo(),
    "packing": work.rows,
    "sampling": Sampling(work.max_tokens, ()),
    "optimizer": None,
    "num_problems": work.prompts,
    "prompt_tokens": work.prompt_tokens[1],
    "num_prompts": work.prompts,
    "group_size": work.group_size,
    "logit_chunk": work.logit_chunk,
  }
  return StepSpec(**(usual | fields))


def random_params(work: works.Work) -> parameters.Params:
  init = functools.partial(parameters.init, work.model)
  return jax.jit(init)(jax.random.key(0))


def compile_function(function, *arguments) -> jax.stages.Compiled:
  """Compiles a function with the options of a run."""
  options = programs.compiler_options(jax.devices()[0].platform)
  return jax.jit(function, compiler_options=options).lower(*arguments).compile()


def launches(compiled: jax.stages.Compiled) -> dict[str, list[int]]:
  """Kernels and host waits of one turn of each loop, on a GPU, as predicted.

  The count of experiment 08; "" is what is outside of loops.
  """
  if jax.devices()[0].platform != "gpu":
    return {}
  counts = hlo.launches(compiled.as_text())
  return {x.loop: [x.kernels, x.syncs] for x in counts}


def _timed(function, arguments, repeats) -> machine.Seconds:
  compiled = compile_function(function, *arguments)
  return machine.timed(lambda: compiled(*arguments), repeats)


def _decode_bytes(work, prompts, rollout) -> float:
  """Weights read at each step of full slots, and each token's cache."""
  model = work.model
  size = jnp.dtype(model.dtype).itemsize
  weights = parameters.num_parameters(model) * size
  context = np.asarray(prompts.lengths, np.float64)[:, None]
  lengths = np.asarray(rollout.lengths, np.float64)
  read = (lengths * context + lengths * (lengths + 1) / 2).sum()
  per_token = 2 * model.layers * model.kv_heads * model.head_dim * size
  return float(rollout.slot_steps) / work.slots * weights + read * per_token


def _row(name, seconds: machine.Seconds, tokens: float, flops: float) -> Row:
  return {
    "name": name,
    **{f"seconds_{k}": v for k, v in seconds._asdict().items()},
    "tokens": tokens,
    "tokens_per_second": tokens / seconds.median,
    "flops": flops,
    "flops_per_second": flops / seconds.median,
  }


def _ratio(name, share, seconds, tokens, whole) -> Row:
  """Time and tokens as shares of the `whole` step's."""
  return _row(name, seconds, tokens, 0.0) | {
    "kept": share,
    "time_ratio": seconds.median / whole[0],
    "token_ratio": tokens / whole[1],
  }
