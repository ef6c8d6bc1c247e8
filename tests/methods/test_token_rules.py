"""Token rules against brute force, and the laws that each of them obeys."""

from hypothesis import given
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dppo_jax.methods import neyman_tokens, top_entropy
from dppo_jax.records import PackedBatch, TokenStats
from dppo_jax.rng import Stage, StepRng, rng_at

# Two micro-batches of two rows: prompts of 2 tokens, completions of the rest.
SEGMENTS = np.array(
  [
    [[1] * 9 + [2] * 7, [1] * 5 + [2] * 5 + [3] * 4 + [0] * 2],
    [[1] * 16, [0] * 16],
  ],
  np.int32,
)
SHARES = {"top_entropy": 0.4, "neyman": 0.6, "neyman_bounded": 0.3}
RULES = {
  "top_entropy": top_entropy(0.4),
  "neyman": neyman_tokens(0.6, min_prob=0.0),
  "neyman_bounded": neyman_tokens(0.3, min_prob=0.1),
}
SELECT = {name: jax.jit(rule.select) for name, rule in RULES.items()}


def _batch(seed=0, segments=SEGMENTS):
  """Returns a batch with random statistics.

  Row [0, 1] has a completion of advantage 0 and a pruned one of weight 0, with
  the largest statistics. Those of positions outside completions are NaN.
  """
  rng = np.random.default_rng(seed)
  shape = segments.shape
  is_new = np.diff(segments, axis=-1, prepend=0) != 0
  is_prompt = is_new | np.roll(is_new, 1, axis=-1)
  of_segment = lambda values: np.take_along_axis(values, segments, axis=-1)
  advantages = rng.normal(size=shape)
  advantages[0, -1, 1] = 0
  weights = rng.uniform(0.1, 1, size=shape)
  weights[0, -1, 3] = 0
  is_trained = (segments > 0) & ~is_prompt
  at_trained = lambda x: jnp.array(np.where(is_trained, x, 0), jnp.float32)
  logprobs = -rng.exponential(size=shape)
  batch = PackedBatch(
    tokens=jnp.zeros(shape, jnp.int32),
    targets=jnp.zeros(shape, jnp.int32),
    positions=jnp.zeros(shape, jnp.int32),
    segment_ids=jnp.array(segments),
    end=jnp.array(segments),
    is_trained=jnp.array(is_trained),
    advantages=at_trained(of_segment(advantages)),
    weights=at_trained(of_segment(weights)),
    old_logprobs=at_trained(logprobs),
  )
  elsewhere = np.where(is_trained, 1e3, np.nan)
  scored = lambda x: jnp.array(
    np.where(_trainable(batch), x, elsewhere), jnp.float32
  )
  stats = TokenStats(
    logprobs=scored(logprobs), entropy=scored(rng.exponential(size=shape))
  )
  return batch, stats


def _draw(seed=0, step=0):
  return rng_at(jax.random.key(seed), step, Stage.TOKENS)


def _trainable(batch):
  return np.asarray(batch.is_trained) & (np.asarray(batch.weights) != 0)


def _choose(name, batch, stats, draw=None):
  stats = stats if RULES[name].needs_stats else None
  chosen = SELECT[name](draw or _draw(), batch, stats)
  return np.asarray(chosen.keep), np.asarray(chosen.prob)


@pytest.mark.parametrize("name", RULES)
def test_token_rule_laws(name):
  batch, stats = _batch()
  keep, prob = _choose(name, batch, stats)
  trainable = _trainable(batch)
  assert keep.shape == prob.shape == SEGMENTS.shape
  assert keep.dtype == bool and prob.dtype == np.float32
  assert not keep[~trainable].any() and not prob[~trainable].any()
  assert ((prob[keep] > 0) & (prob[keep] <= 1)).all()
  again, _ = _choose(name, batch, stats)
  np.testing.assert_array_equal(keep, again)
  assert keep.sum() == round(SHARES[name] * trainable.sum())
  for seed in (1, 2):
    _choose(name, *_batch(seed), _draw(seed, step=seed))
  assert SELECT[name]._cache_size() == 1


@given(st.integers(0, 10**6), st.sampled_from(sorted(RULES)))
def test_untrainable_tokens_are_never_chosen(seed, name):
  batch, stats = _batch(seed)
  keep, prob = _choose(name, batch, stats, _draw(seed))
  trainable = _trainable(batch)
  assert not keep[~trainable].any() and not prob[~trainable].any()
  if name.startswith("neyman"):
    assert (prob[trainable] > 0).all()
    assert keep.sum() == round(SHARES[name] * trainable.sum())


@pytest.mark.parametrize(
  "rule", [top_entropy(1.0), neyman_tokens(1.0, min_prob=0.0)]
)
def test_fraction_of_1_keeps_every_token(rule):
  batch, stats = _batch()
  chosen = jax.jit(rule.select)(_draw(), batch, stats)
  np.testing.assert_array_equal(chosen.keep, _trainable(batch))
  np.testing.assert_array_equal(chosen.prob, _trainable(batch))


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("where", ["advantages", "weights"])
def test_nan_completion_keeps_a_token(name, where):
  """The update is then non-finite, so it is skipped and counted."""
  batch, stats = _batch()
  spoiled = np.zeros(SEGMENTS.shape, bool)
  spoiled[0, 0] = (SEGMENTS[0, 0] == 2) & _trainable(batch)[0, 0]
  assert spoiled.sum() == 5
  values = jnp.where(spoiled, jnp.nan, getattr(batch, where))
  batch = batch.replace(**{where: values})
  for seed in range(20):
    keep, prob = _choose(name, batch, stats, _draw(seed))
    assert keep[spoiled].any()
    assert np.isfinite(prob).all()


@given(st.integers(0, 10**6))
def test_top_entropy_by_brute_force(seed):
  batch, stats = _batch(seed)
  trainable = _trainable(batch)
  score = np.abs(batch.advantages) * np.asarray(stats.entropy)
  score[0, 1, SEGMENTS[0, 1] == 1] = 0.0  # ties that may go either way

  keep, prob = _choose("top_entropy", batch, stats, _draw(seed))
  assert keep.sum() == round(0.4 * trainable.sum())
  assert score[keep].min() >= score[trainable & ~keep].max()
  for row in np.ndindex(SEGMENTS.shape[:-1]):
    for segment in range(1, SEGMENTS[row].max() + 1):
      mine = (SEGMENTS[row] == segment) & trainable[row]
      if not mine.any():
        continue
      np.testing.assert_array_equal(
        prob[row][mine], np.float32(keep[row][mine].mean())
      )


def test_small_fraction_keeps_at_least_one_token():
  batch, stats = _batch()
  for rule in (top_entropy(1e-3), neyman_tokens(1e-3)):
    assert jax.jit(rule.select)(_draw(), batch, stats).keep.sum() == 1


def test_ties_are_broken_uniformly_at_random():
  """Uniform draws miss one of 20 tokens in 200 with probability 1e-43."""
  batch, stats = _batch()
  batch = batch.replace(advantages=jnp.zeros(SEGMENTS.shape))
  select = RULES["top_entropy"].select
  root = jax.random.split(jax.random.key(0), 200)
  keep = jax.jit(
    jax.vmap(lambda key: select(StepRng(key, jnp.int32(0)), batch, stats))
  )(root).keep
  np.testing.assert_array_equal(keep.any(axis=0), _trainable(batch))


def test_the_reweighted_mean_is_the_mean_over_what_was_kept():
  batch, stats = _batch()
  values = np.random.default_rng(1).normal(size=SEGMENTS.shape)
  keep, prob = _choose("top_entropy", batch, stats)
  mine = (SEGMENTS == 2) & _trainable(batch)
  mine[0, 1] = False
  kept = mine & keep
  assert 0 < kept.sum() < mine.sum()
  terms = values[kept] / prob[kept]
  np.testing.assert_allclose(
    terms.sum() / mine.sum(), values[kept].mean(), rtol=1e-6
  )


def test_fraction_may_follow_the_step():
  batch, stats = _batch()
  schedule = lambda step: jnp.minimum(0.2 + 0.2 * step.astype(jnp.float32), 1.0)
  select = jax.jit(top_entropy(schedule).select)
  kept = [
    int(select(_draw(step=step), batch, stats).keep.sum())
    for step in (0, 1, 4, 9)
  ]
  count = _trainable(batch).sum()
  assert kept == [round(0.2 * count), round(0.4 * count), count, count]
  assert select._cache_size() == 1


def test_probabilities_grow_with_the_possible_gradient():
  batch, stats = _batch()
  _, prob = _choose("neyman", batch, stats)
  measure = 1 - np.exp(batch.old_logprobs)
  measure *= np.abs(batch.advantages * batch.weights)
  inner = (prob < 1) & (prob > 1e-3)
  assert inner.sum() > 3 and (prob == 1).any()
  scale = prob[inner] / measure[inner]
  np.testing.assert_allclose(scale, scale[0], rtol=2e-3)
  assert (measure[prob == 1] * scale[0] > 1 - 1e-4).all()
  # Tokens of advantage 0 keep a chance, the least there is.
  silent = _trainable(batch) & (np.asarray(batch.advantages) == 0)
  assert (
    silent.any() and (prob[silent] > 0).all() and (prob[silent] < 1e-4).all()
  )


def test_the_least_probability_bounds_the_weights():
  batch, stats = _batch()
  _, prob = _choose("neyman_bounded", batch, stats)
  assert prob[_trainable(batch)].min() >= 0.1


@pytest.mark.parametrize("name", [n for n in RULES if n.startswith("neyman")])
def test_tokens_are_kept_with_reported_probabilities(name):
  """Tolerance: 5 standard errors of 42 shares; false alarm below 3e-5."""
  (batch, stats), num = _batch(), 10_000
  select = lambda key: RULES[name].select(
    StepRng(key, jnp.int32(0)), batch, stats
  )
  drawn = jax.jit(jax.vmap(select))(jax.random.split(jax.random.key(0), num))
  prob = np.asarray(drawn.prob[0])
  error = 5 * np.sqrt(prob * (1 - prob) / num)
  share = np.asarray(drawn.keep, np.float64).mean(axis=0)
  # The rarest have a probability of 1 / GRID: one may be seen once or twice.
  assert (np.abs(share - prob) <= error + 2 / num).all()
  sizes = np.asarray(drawn.keep).sum(axis=(1, 2, 3))
  np.testing.assert_array_equal(sizes, round(prob.astype(np.float64).sum()))


def test_neighbours_exclude_each_other():
  """Tokens of equal size at a share of 1/4: one of every four in a row."""
  segments = np.array([[[1] * 18]], np.int32)
  batch, _ = _batch(segments=segments)
  batch = batch.replace(
    old_logprobs=jnp.full(segments.shape, -1.0),
    advantages=jnp.ones(segments.shape),
    weights=jnp.ones(segments.shape),
  )
  select = jax.jit(neyman_tokens(0.25).select)
  for seed in range(8):
    places = np.flatnonzero(select(_draw(seed), batch, None).keep)
    np.testing.assert_array_equal(np.diff(places), 4)
