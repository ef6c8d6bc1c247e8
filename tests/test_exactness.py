"""Pruned gradients average to the full batch's: every draw, none sampled.

A small model, three prompts of three completions, prompts and completions and
tokens pruned together, clipping and the KL penalty at work. Deliberately wrong
variants must fail the same test.
"""

import dataclasses
import functools

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import pytest

from dppo_jax import methods
from dppo_jax.algo import objectives
from dppo_jax.algo.packing import PackingSpec
from dppo_jax.models import lora
from dppo_jax.records import Selection, TokenStats
from dppo_jax.rng import Stage, rng_at
from dppo_jax.step import choose_tokens, select, update
from tests.helpers import small
from tests.helpers.enumeration import Draws

REWARDS = jnp.array([[1.0, 0.0, 0.0], [0.0, 1.0, 1.0], [1.0, 1.0, 1.0]])
BEFORE = jnp.array([[1.0, 0.0, 0.0], [1.0, 1.0, 1.0], [0.0, 0.0, 0.0]])
BUDGET = jnp.float32(0.6)  # for methods whose policy chooses it
RNG = rng_at(jax.random.key(0), 1, Stage.COMPLETIONS)
SPEC = PackingSpec(row_length=24, rows_per_micro=2, window=4)
IDS = jnp.arange(3, dtype=jnp.int32)

_ACTIVE = {"beta": 0.3}
OBJECTIVES = {
  "grpo": objectives.grpo(0.1, 0.15, **_ACTIVE),
  # A denominator known before any draw: exact where prompts are pruned too.
  "dapo": objectives.dapo(0.1, 0.15, **_ACTIVE, tokens_per_completion=3.0),
  "dr_grpo": objectives.dr_grpo(0.1, 0.15, **_ACTIVE),
  "gspo": objectives.gspo(0.1, 0.15, **_ACTIVE),
  "cispo": objectives.cispo(0.1, 0.15, **_ACTIVE, tokens_per_completion=3.0),
  "rloo": objectives.rloo(beta=0.3),
  "grpo without KL": objectives.grpo(0.1, 0.15),
}
LOSSES = ("cispo", "rloo")
WEIGHTED = {
  "dppo": methods.dppo(0.6, 0.7),
  "dppo, batch": methods.dppo(0.6, 0.7, "batch"),
  "greso": methods.greso(0.5, dynamic_sampling="none"),
  "neyman": methods.neyman(0.67, 0.6),
  "neyman, automatic": methods.neyman(0.67),
  "neyman, tokens": methods.neyman(0.67, 0.7, token_budget=0.6),
}


def _prompt_draws(method):
  history = method.prompts.init(3)
  lengths = jnp.array([[4, 5, 3], [2, 2, 2], [5, 5, 5]], jnp.int32)
  zero = jnp.int32(0)
  history = method.prompts.observe(history, zero, IDS, BEFORE, BEFORE, lengths)
  select = lambda: (method.prompts.select(RNG, history, IDS),)
  return list(Draws(select, IDS.shape)())


def _draws(
  method, objective, is_weighted=True, part=0, num_parts=1, stopped=None
):
  """Chance, prompts, completions and packed batch of every possible draw."""
  forget = lambda chosen: chosen.replace(prob=jnp.ones_like(chosen.prob))
  spec = small.spec(
    objective=objective,
    packing=SPEC,
    mini_batches=num_parts,
    mask_truncated=stopped is not None,
  )

  def pack(rollout):
    chosen = []

    def spy(*args):
      chosen.append(method.completions(*args))
      return chosen[0] if is_weighted else forget(chosen[0])

    batch, num_micro, *_ = select.select(
      RNG,
      small.prompts(),
      rollout,
      jnp.where(rollout.kept.keep[:, None], REWARDS, 0.0),
      BUDGET,
      part=part,
      spec=dataclasses.replace(spec, method=method._replace(completions=spy)),
    )
    return chosen[0], batch, num_micro

  def refine(batch):
    chosen = []

    def spy(rng, batch, stats):
      chosen.append(method.tokens.select(rng, batch, stats))
      return chosen[0]

    tokens = method.tokens._replace(select=spy)
    of_tokens = dataclasses.replace(spec, method=method._replace(tokens=tokens))
    batch, _ = choose_tokens(RNG, batch, None, spec=of_tokens)
    return chosen[0], batch

  completions = Draws(pack, (3 // num_parts, 3))
  tokens = Draws(refine, ())
  full = small.rollout(small.prompts())
  if stopped is not None:
    full = full.replace(is_stopped=stopped)
  for by_prompts, kept in _prompt_draws(method):
    lengths = jnp.where(kept.keep[:, None], full.lengths, 0)
    rollout = full.replace(
      lengths=lengths, kept=kept if is_weighted else forget(kept)
    )
    for by_completions, chosen, batch, num_micro in completions(rollout):
      chance = by_prompts * by_completions
      if not method.tokens:
        yield chance, kept, chosen, batch, num_micro
        continue
      for by_tokens, _, refined in tokens(batch):
        yield chance * by_tokens, kept, chosen, refined, num_micro


@functools.partial(jax.jit, static_argnames=("objective", "model"))
def _gradient(
  params, reference, batch, num_micro, objective, model=small.MODEL
):
  spec = small.spec(model=model, objective=objective, inner_updates=2)
  total = update.sum_gradients(batch, num_micro, params, reference, spec=spec)
  leaves = jax.tree.leaves(total.grad)
  return jnp.concatenate([jnp.ravel(x) for x in leaves]), total.sums


def _gradient_of(batch, num_micro, objective, params=None):
  params = small.params(0) if params is None else params
  gradient, sums = _gradient(
    params, small.params(1), batch, num_micro, objective
  )
  return np.asarray(gradient, np.float64), sums


@functools.cache
def _full(name):
  (_, _, _, batch, num_micro), *others = _draws(
    methods.grpo(), OBJECTIVES[name]
  )
  assert not others
  return _gradient_of(batch, num_micro, OBJECTIVES[name])


def _mean(method, name, scale=None, is_weighted=True):
  """The mean gradient over every draw, and how many draws there are."""
  scale = scale or (lambda kept, chosen: 1.0)
  mean, total, num = 0.0, 0.0, 0
  for chance, kept, chosen, batch, num_micro in _draws(
    method, OBJECTIVES[name], is_weighted
  ):
    gradient, _ = _gradient_of(batch, num_micro, OBJECTIVES[name])
    mean = mean + chance * scale(kept, chosen) * gradient
    total, num = total + chance, num + 1
  np.testing.assert_allclose(total, 1.0, rtol=1e-6)
  return mean, num


def _distance(actual, want):
  return np.linalg.norm(actual - want) / np.linalg.norm(want)


@pytest.mark.slow
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_clipping_and_penalty_are_at_work(objective):
  _, sums = _full(objective)
  assert (sums["clipped"] > 2) == (objective != "rloo")
  assert (sums["kl"] > 0) == bool(OBJECTIVES[objective].beta)


CASES = [
  (method, objective)
  for method in WEIGHTED
  for objective in OBJECTIVES
  # Another proposal, the same weights: once is enough. Another loss of a token:
  # independent draws and a fixed number, of prompts, completions and tokens.
  if objective == "grpo"
  or method in ("dppo", "neyman, tokens")
  or (method in ("greso", "neyman") and objective not in LOSSES)
]


@pytest.mark.parametrize(("method", "objective"), CASES)
def test_pruned_gradient_averages_to_that_of_the_full_batch(method, objective):
  mean, num = _mean(WEIGHTED[method], objective)
  assert num >= 4
  assert _distance(mean, _full(objective)[0]) < 2e-5


@pytest.mark.slow
@pytest.mark.parametrize("method", ["dppo", "neyman, tokens"])
def test_pruned_gradient_of_adapters_averages_to_that_of_the_full_batch(method):
  """The reference of the KL penalty is the model without adapters."""
  adapters = lora.Lora(2, 4.0, tuple(lora.LINEAR))
  model = dataclasses.replace(small.MODEL, lora=adapters)
  trained = lora.trainable(small.params(1, model))
  params = small.params(0, model) | jax.tree.map(lambda x: x + 0.1, trained)

  def mean(method):
    total = 0.0
    for chance, *_, batch, num_micro in _draws(method, OBJECTIVES["grpo"]):
      arrays = params, None, batch, num_micro
      gradient, sums = _gradient(*arrays, OBJECTIVES["grpo"], model)
      total = total + chance * np.asarray(gradient, np.float64)
    assert sums["kl"] > 0
    return total

  full = mean(methods.grpo())
  assert full.size == sum(x.size for x in jax.tree.leaves(trained))
  assert _distance(mean(WEIGHTED[method]), full) < 2e-5


@pytest.mark.parametrize(
  "method", [pytest.param("dppo", marks=pytest.mark.slow), "neyman, tokens"]
)
def test_each_mini_batch_averages_to_the_gradient_of_its_own_prompts(method):
  """Each part has its own draw, and advantages of the whole rollout."""
  objective, parts = OBJECTIVES["grpo"], []
  for part in range(3):
    ((_, _, _, *batch),) = _draws(methods.grpo(), objective, True, part, 3)
    parts.append(_gradient_of(*batch, objective)[0])
    mean = 0.0
    for chance, _, _, *batch in _draws(
      WEIGHTED[method], objective, True, part, 3
    ):
      mean = mean + chance * _gradient_of(*batch, objective)[0]
    assert _distance(mean, parts[part]) < 2e-5
  assert _distance(parts[0], parts[1]) > 0.1
  assert _distance(sum(parts), _full("grpo")[0]) < 2e-5


@pytest.mark.parametrize("method", WEIGHTED)
def test_pruning_masked_completions_averages_to_the_masked_batch(method):
  stopped = jnp.array([[1, 1, 0], [1, 1, 0], [1, 0, 0]]) > 0
  objective, args = OBJECTIVES["grpo"], (True, 0, 1, stopped)
  ((_, _, _, *batch),) = _draws(methods.grpo(), objective, *args)
  full, mean, num = _gradient_of(*batch, objective)[0], 0.0, 0
  for chance, _, _, *batch in _draws(WEIGHTED[method], objective, *args):
    mean = mean + chance * _gradient_of(*batch, objective)[0]
    num += 1
  assert num >= 2
  assert _distance(mean, full) < 2e-5
  assert _distance(mean, _full("grpo")[0]) > 0.1


def test_a_later_update_with_its_own_draw_is_unbiased_given_its_parameters():
  """With the draw of the update before it, it is not."""
  objective, params = OBJECTIVES["grpo"], small.params(0)
  flat, unflatten = jax.flatten_util.ravel_pytree(params)
  ((_, _, _, *everything),) = _draws(methods.grpo(), objective)
  draws = [
    (chance, batch)
    for chance, _, _, *batch in _draws(methods.dppo(0.0, 0.7), objective)
  ]
  assert len(draws) >= 4
  bias = {"own": 0.0, "shared": 0.0}
  for chance, first in draws:
    moved = unflatten(flat - 0.05 * _gradient_of(*first, objective)[0])
    moved = jax.tree.map(lambda x, y: x.astype(y.dtype), moved, params)
    at_moved = lambda batch, at=moved: _gradient_of(*batch, objective, at)[0]
    want = at_moved(everything)
    mean = sum(p * at_moved(batch) for p, batch in draws)
    assert _distance(mean, want) < 2e-5
    bias["own"] += chance * (mean - want)
    bias["shared"] += chance * (at_moved(first) - want)
  size = np.linalg.norm(_full("grpo")[0])
  norms = {name: np.linalg.norm(x) / size for name, x in bias.items()}
  assert norms["own"] < 2e-5 and norms["shared"] > 0.01, norms


def test_every_update_on_a_rollout_has_its_own_randomness():
  data = lambda rng: tuple(jax.random.key_data(rng.key).tolist())
  keys = [data(RNG.draw(i)) for i in range(4)]
  assert len(set(keys)) == 4 and keys[0] == data(RNG)


def test_every_method_is_tested_or_known_to_be_biased():
  biased = {"cppo", "pods", "d1s", "d2s", "d3s"}
  enumerated = {name.partition(",")[0] for name in WEIGHTED}
  assert set(methods.METHODS) == biased | enumerated | {"grpo"}


def test_a_token_mean_over_the_batch_is_exact_where_every_prompt_is_kept():
  """The denominator is known before completions are chosen."""
  OBJECTIVES["dapo, own mean"] = objectives.dapo(0.1, 0.15, **_ACTIVE)
  mean, num = _mean(methods.dppo(0.0, 0.7), "dapo, own mean")
  assert num >= 4
  assert _distance(mean, _full("dapo, own mean")[0]) < 2e-5


def _hajek(kept, chosen):
  weight = jnp.where(kept.keep[:, None] & chosen.keep, 1.0, 0.0)
  weight = weight / (
    kept.prob[:, None] * jnp.where(chosen.keep, chosen.prob, 1)
  )
  return weight.size / max(float(weight.sum()), 1e-6)


def _retained(kept, chosen):
  keep = kept.keep[:, None] & chosen.keep
  return keep.size / max(float(keep.sum()), 1)


def _expected_share(rng, groups, budget):
  """A mean over the kept items, times the expected fraction kept."""
  chosen = methods.drop_small_advantage(0.7)(rng, groups)
  share = lambda x: x.astype(jnp.float32).mean(axis=1, keepdims=True)
  ratio = share(chosen.keep) / share(chosen.prob)
  return chosen.replace(prob=chosen.prob * ratio)


def _misreported(rng, groups, budget):
  """Keeps with a probability of 0.4 and reports 0.5."""
  chosen = methods.drop_small_advantage(0.6)(rng, groups)
  return chosen.replace(prob=jnp.where(chosen.prob < 1, 0.5, 1.0))


def _lowest_first(rng, groups, budget):
  """Drops what it says that it drops with a probability of 0.7."""
  prob = methods.drop_small_advantage(0.7)(rng, groups).prob
  return Selection(prob == 1, prob)


def _with_completions(rule):
  return methods.dppo(0.6, 0.7)._replace(completions=rule)


def _with_prompts(rate, reported):
  """Drops prompts at one rate and reports another."""
  method = methods.dppo(rate, 0.7)

  def select(rng, history, ids):
    chosen = method.prompts.select(rng, history, ids)
    prob = jnp.where(chosen.prob < 1, 1 - reported, 1.0)
    return chosen.replace(prob=prob)

  return method._replace(prompts=method.prompts._replace(select=select))


WRONG = {
  "Hajek": {"method": methods.dppo(0.6, 0.7), "scale": _hajek},
  "Hajek, fixed size": {"method": methods.neyman(0.67, 0.6), "scale": _hajek},
  "no weights": {"method": methods.dppo(0.6, 0.7), "is_weighted": False},
  "retained count": {
    "method": methods.dppo(0.6, 0.7),
    "scale": _retained,
    "is_weighted": False,
  },
  "no weights of prompts": {
    "method": methods.greso(dynamic_sampling="none"),
    "is_weighted": False,
  },
  "statistics after": {
    "method": methods.dppo(0.6, 0.7)._replace(has_statistics_after=True)
  },
  "expected share": {"method": _with_completions(_expected_share)},
  "misreported": {"method": _with_completions(_misreported)},
  "misreported prompts": {"method": _with_prompts(0.6, 0.5)},
  "fixed share, lowest first": {"method": _with_completions(_lowest_first)},
  "top advantage": {"method": methods.cppo(0.5)},
  "top advantage, batch": {"method": methods.cppo(0.5, "batch")},
  "max variance": {"method": methods.d1s(0.7)},
  "max variance, renormalised": {"method": methods.pods(0.7)},
}


@pytest.mark.slow
@pytest.mark.parametrize("wrong", WRONG)
def test_biased_variants_fail_the_enumeration(wrong):
  mean, _ = _mean(name="grpo", **WRONG[wrong])
  assert _distance(mean, _full("grpo")[0]) > 1e-2


COLLAPSED = {
  "dppo": methods.dppo(0.0, 0.0),
  "cppo": methods.cppo(1.0),
  "cppo, batch": methods.cppo(1.0, "batch"),
  "greso": methods.greso(1.0, tuning=0.0, dynamic_sampling="none"),
  "d1s": methods.d1s(1.0),
  "d1s, batch": methods.d1s(1.0, "batch"),
  "d2s": methods.d2s(1.0, 1.0),
  "d3s": methods.d3s(1.0, 1.0),
  "d3s, at its end": methods.d3s(total_steps=2),
  "pods": methods.pods(1.0),
  "neyman": methods.neyman(1.0, 1.0),
  "neyman, tokens": methods.neyman(1.0, 1.0)._replace(
    tokens=methods.neyman_tokens(1.0)
  ),
}


@pytest.mark.parametrize("method", COLLAPSED)
def test_keeping_all_is_bit_identical_to_grpo(method):
  method, objective = COLLAPSED[method], OBJECTIVES["grpo without KL"]
  (_, kept), *others = _prompt_draws(method)
  assert kept.keep.all() and (kept.prob == 1).all() and not others
  rollout = small.rollout(small.prompts())

  @jax.jit
  def pack(stats):
    spec = small.spec(method=method, objective=objective, packing=SPEC)
    batch, num_micro, *_ = select.select(
      RNG, small.prompts(), rollout, REWARDS, spec=spec
    )
    if method.tokens:
      stats = jax.tree.map(
        lambda x: jnp.broadcast_to(x, batch.weights.shape), stats
      )
      batch, _ = choose_tokens(RNG, batch, stats, spec=spec)
    return batch, num_micro

  half = jnp.float32(0.5)
  batch, num_micro = pack(TokenStats(-half, half))
  (_, _, _, want, want_micro), *_ = _draws(methods.grpo(), objective)
  jax.tree.map(
    np.testing.assert_array_equal, (batch, num_micro), (want, want_micro)
  )
