"""CPU seconds of an update at each choice, over those of the full update.

Of the same batch, every choice at a quarter of the tokens: chosen, packed and
its gradient summed, by the functions that a run compiles. Turn by turn, so that
other work on the machine affects all equally; the median of the turns.
"""

from collections.abc import Callable
import time

import jax
import jax.numpy as jnp
import numpy as np

from dppo_jax import methods
from dppo_jax.step import pack, update

from . import completions, prefixes, sampling, tokens
from . import pool as pools
from .batch import Batch

BUDGET = 0.25
TURNS = 5


def measure(sampled: Batch) -> list[dict]:
  """Seconds of an update of each rule, absolute and as shares of the full."""
  config = sampled.run.spec.update_config

  @jax.jit
  def gradient(packed, used):
    return update.sum_gradients(packed, used, sampled.params, None, config)

  spent: dict[str, list[float]] = {}
  makers = _makers(sampled)
  for turn in range(TURNS + 1):  # the first compiles
    for name, make in makers.items():
      start = time.process_time()
      jax.block_until_ready(gradient(*make(jax.random.key(turn))))
      if turn:
        spent.setdefault(name, []).append(time.process_time() - start)
  median = {name: float(np.median(times)) for name, times in spent.items()}
  return [
    {
      "method": name,
      "budget": 1.0 if name == "full" else BUDGET,
      "seconds": seconds,
      "of_full": seconds / median["full"],
      "times": spent[name],
    }
    for name, seconds in median.items()
  ]


def _makers(sampled: Batch) -> dict[str, Callable]:
  """Name to a function from a key to the rows of one draw."""
  makers = {"full": _method(sampled, methods.grpo())}
  for name, make in completions.by_share(sampled).items():
    method = completions.at_budget(sampled, make, BUDGET)
    if method:
      makers[f"completions: {name}"] = _method(sampled, method)
  for name in tokens.NAMES:
    method = tokens.of_tokens(sampled, name, BUDGET)
    makers[f"tokens: {name}"] = _method(sampled, method)
  for name, rule in prefixes.RULES.items():
    makers[f"prefixes: {name}"] = _cut(sampled, name, rule)
  pool = pools.prepare(sampled)
  rng = np.random.default_rng(1)
  for name, rule in sampling.RULES.items():
    drawn = rule(pool, rng, BUDGET)
    if drawn:
      makers[f"rollouts: {name}"] = _rows(sampled, drawn.example)
  return makers


def _method(sampled: Batch, method: methods.Method) -> Callable:
  """Chooses completions, packs them, and chooses tokens."""
  pick, choose = tokens.choices(sampled, method)
  config = sampled.run.spec.update_config
  needs_stats = method.tokens and method.tokens.needs_stats
  score = jax.jit(
    lambda packed, used: update.score(sampled.params, config, packed, used)
  )

  def make(key):
    packed, used = pick(key)
    if method.tokens:
      stats = score(packed, used) if needs_stats else None
      packed, _ = choose(key, packed, stats)
    return packed, used

  return make


def _cut(sampled: Batch, name: str, rule) -> Callable:
  """Prefixes shorten what is packed; a mask over tokens thins the weights."""
  prob = jnp.asarray(rule(sampled, BUDGET), jnp.float32)
  shape = sampled.rewards.shape
  if name.startswith("prefixes"):

    def make(key):
      draw = jax.random.uniform(key, prob.shape[:1])
      kept = (draw[:, None] < prob).sum(axis=1, dtype=jnp.int32)
      return _rows(sampled, kept.reshape(shape))(key)

    return make
  whole = _rows(sampled, sampled.live_tokens.reshape(shape))

  def thin(key):
    packed, used = whole(key)
    share = prob.sum() / sampled.live_tokens.sum()
    keep = jax.random.uniform(key, packed.weights.shape) < share
    return packed.replace(weights=jnp.where(keep, packed.weights, 0.0)), used

  return thin


def _rows(sampled: Batch, lengths) -> Callable:
  """Packs completions of these lengths, `[Q, n]`; which ones costs nothing."""
  rollout, spec = sampled.rollout, sampled.run.spec.packing
  copies = -(-lengths.shape[1] // rollout.tokens.shape[1])
  lengths = jnp.asarray(lengths, jnp.int32)
  spare = copies * rollout.tokens.shape[1] - lengths.shape[1]
  lengths = jnp.pad(lengths, ((0, 0), (0, spare)))
  copied = lambda x: jnp.concatenate([x] * copies, axis=1)
  rollout = rollout.replace(
    tokens=copied(rollout.tokens),
    logprobs=copied(rollout.logprobs),
    lengths=lengths,
  )

  @jax.jit
  def pack_all(rollout):
    ones = jnp.ones(rollout.lengths.shape)
    return pack(sampled.prompts, rollout, ones, ones, spec)[:2]

  return lambda key: pack_all(rollout)
