"""Rollout: what is sampled, and what it must not depend on."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dppo_jax import rollout, sharding
from dppo_jax.errors import UserError
from dppo_jax.models import kv_cache, parameters, transformer
from dppo_jax.records import PromptBatch, Selection
from dppo_jax.rng import Stage, rng_at
from dppo_jax.rollout import decode, generate, sampling
from dppo_jax.run import compile_cache
from tests.helpers import small

ONE_LAYER = dataclasses.replace(small.MODEL, layers=1)  # compiles faster
RNG = rng_at(jax.random.key(5), 0, Stage.ROLLOUT)


@pytest.fixture(autouse=True)
def _prefill_in_chunks(monkeypatch):
  monkeypatch.setattr(generate, "prefill_batch_size", lambda length: 2)


@functools.cache
def _sampler(**kwargs):
  args = dict(
    group_size=4,
    max_tokens=12,
    num_slots=4,
    stop_ids=(small.STOP,),
    model_config=ONE_LAYER,
  )
  return jax.jit(functools.partial(rollout.sample, **(args | kwargs)))


def _sample(prompts, kept=None, params=None, **kwargs):
  params = _params() if params is None else params
  return _sampler(**kwargs)(params, prompts=prompts, rng=RNG, kept=kept)


def _params():
  return small.params(config=ONE_LAYER)


def _prompts(num=6):
  return small.prompts(num)


def test_logprobs_are_those_of_the_full_forward_pass():
  """Prefill, cache and slots give what one pass over each sequence gives."""
  prompts = _prompts()
  actual = _sample(
    prompts, params=small.params(), temperature=0.8, model_config=small.MODEL
  )
  params, positions = small.params(), jnp.arange(24, dtype=jnp.int32)[None]

  @jax.jit
  def log_softmax(tokens):
    hidden = transformer.forward(
      params, small.MODEL, tokens, positions, positions * 0 + 24
    )
    logits = transformer.logits(params, small.MODEL, hidden)[0]
    return jax.nn.log_softmax(logits / 0.8)

  prompts, actual = jax.device_get((prompts, actual))
  for q, g in np.ndindex(6, 4):
    n, n_prompt = int(actual.lengths[q, g]), int(prompts.lengths[q])
    tokens = np.zeros((1, 24), np.int32)
    tokens[0, :n_prompt] = prompts.tokens[q, :n_prompt]
    tokens[0, n_prompt : n_prompt + n] = actual.tokens[q, g, :n]
    logprobs = np.asarray(log_softmax(tokens))[n_prompt - 1 :][:n]
    alone = logprobs[np.arange(n), actual.tokens[q, g, :n]]
    np.testing.assert_allclose(actual.logprobs[q, g, :n], alone, atol=2e-5)


def test_another_key_compiles_nothing():
  options = dict(
    model_config=ONE_LAYER,
    prompts=small.prompts(2),
    group_size=1,
    num_slots=2,
    max_tokens=2,
    stop_ids=(small.STOP,),
  )
  params = small.params(0, ONE_LAYER)
  rollout.sample(params, rng=jax.random.key(0), **options)
  with compile_cache.compilations() as compilations:
    rollout.sample(params, rng=jax.random.key(1), **options)
  assert not compilations


def test_a_completion_ends_with_its_stop_token_or_at_the_limit():
  actual = _sample(_prompts(), stop_ids=(small.STOP, 7))
  tokens, lengths = np.asarray(actual.tokens), np.asarray(actual.lengths)
  assert lengths.min() < 12 and actual.is_stopped.any()
  for q, g in np.ndindex(6, 4):
    n = lengths[q, g]
    is_stop = np.isin(tokens[q, g], (small.STOP, 7))
    assert not is_stop[: n - 1].any()
    assert is_stop[n - 1] == actual.is_stopped[q, g]
    assert actual.is_stopped[q, g] or n == 12
    assert (tokens[q, g, n:] == 0).all() and (
      actual.logprobs[q, g, n:] == 0
    ).all()


@pytest.mark.parametrize(
  ("num_slots", "num_prompts"),
  [(1, 6), (7, 6), (9, 2)],  # the last: one for each of 8 completions, and more
)
def test_tokens_do_not_depend_on_the_number_of_slots(num_slots, num_prompts):
  prompts = jax.tree.map(lambda x: x[:num_prompts], _prompts())
  want, actual = _sample(_prompts()), _sample(prompts, num_slots=num_slots)
  np.testing.assert_array_equal(actual.tokens, want.tokens[:num_prompts])
  np.testing.assert_array_equal(actual.lengths, want.lengths[:num_prompts])
  np.testing.assert_allclose(
    actual.logprobs, want.logprobs[:num_prompts], atol=1e-5
  )


def test_tokens_do_not_depend_on_the_schedule_of_the_stages(monkeypatch):
  """Fewer slots at the end change nothing but the time."""
  want = _sample(_prompts(), num_slots=20)
  monkeypatch.setattr(decode, "slot_schedule", lambda num_slots: [num_slots])
  # Functions that are traced again.
  monkeypatch.setattr(generate, "_sample", generate._sample.__wrapped__)
  sample = _sampler.__wrapped__(num_slots=20)
  actual = sample(_params(), prompts=_prompts(), rng=RNG, kept=None)
  np.testing.assert_array_equal(actual.tokens, want.tokens)
  np.testing.assert_allclose(actual.logprobs, want.logprobs, atol=1e-5)
  assert actual.slot_steps > want.slot_steps


@pytest.mark.slow
@pytest.mark.parametrize(
  ("num_slots", "keep"),
  [(1, [1, 0, 1, 1, 0, 0]), (7, [1, 1, 1, 1, 1, 1]), (40, [1, 0, 1, 1, 0, 0])],
)
def test_slots_that_share_prompts_sample_the_same_tokens(
  tpu_kernels, num_slots, keep
):
  """Prompts are not copied."""
  keep = jnp.array(keep) > 0
  kept = Selection(keep, jnp.full(6, 0.5))
  model = dataclasses.replace(small.MODEL, head_dim=128)
  shared = dataclasses.replace(model, attention="splash")
  params = small.params(config=model)
  sample = functools.partial(_sample, _prompts(), kept, params)
  want = sample(model_config=model)
  out = sample(model_config=shared, num_slots=num_slots)
  np.testing.assert_array_equal(out.tokens, want.tokens)
  np.testing.assert_array_equal(out.lengths, want.lengths)
  np.testing.assert_array_equal(out.is_stopped, want.is_stopped)
  np.testing.assert_allclose(out.logprobs, want.logprobs, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(1, 1), (2, 2)])
def test_kernels_for_tpus_sample_the_same_tokens(tpu_kernels, shape):
  """Slots share prompts, on one device or a mesh that divides heads."""
  config = dataclasses.replace(small.MODEL, head_dim=128)
  shared = dataclasses.replace(config, attention="splash")
  assert shared.shares_prompts and not config.shares_prompts
  params = small.params(config=config)
  want = _sample(_prompts(8), params=params, model_config=config)
  options = dict(num_slots=7)
  mesh = sharding.make_mesh(*shape)
  with jax.set_mesh(mesh):
    params = jax.device_put(params, parameters.shardings(shared, mesh))
    out = _sample(_prompts(8), params=params, model_config=shared, **options)
  np.testing.assert_array_equal(out.tokens, want.tokens)
  np.testing.assert_array_equal(out.lengths, want.lengths)
  np.testing.assert_allclose(out.logprobs, want.logprobs, atol=1e-5)


def test_tokens_do_not_depend_on_neighbours_or_order():
  prompts, order = _prompts(), np.array([4, 0, 5, 2, 1, 3])
  want = _sample(prompts)
  actual = _sample(jax.tree.map(lambda x: x[order], prompts))
  np.testing.assert_array_equal(actual.tokens, want.tokens[order])
  # The others' texts change; the prompt and its id stay.
  changed = prompts.replace(
    tokens=jnp.where(prompts.ids[:, None] == 12, prompts.tokens, 3)
  )
  actual = _sample(changed)
  np.testing.assert_array_equal(actual.tokens[2], want.tokens[2])
  assert not (actual.tokens[1] == want.tokens[1]).all()
  other = prompts.replace(ids=prompts.ids + 100)
  assert not (_sample(other).tokens == want.tokens).all()


def test_pruned_prompts_cost_nothing_and_change_nothing():
  prompts = _prompts()
  keep = jnp.array([True, False, True, True, False, False])
  want = _sample(prompts)
  actual = _sample(prompts, kept=Selection(keep, jnp.full(6, 0.5)))
  np.testing.assert_array_equal(actual.tokens[keep], want.tokens[keep])
  assert (actual.lengths[~keep] == 0).all() and (
    actual.tokens[~keep] == 0
  ).all()
  assert actual.slot_steps < 0.7 * want.slot_steps
  np.testing.assert_array_equal(actual.kept.keep, keep)


@pytest.mark.slow
def test_the_likeliest_token_is_the_limit_of_every_truncation():
  greedy = _sample(_prompts(), temperature=0.0)
  for kwargs in (dict(top_k=1), dict(top_p=1e-6), dict(temperature=1e-4)):
    actual = _sample(_prompts(), **kwargs)
    np.testing.assert_array_equal(actual.tokens, greedy.tokens)
    np.testing.assert_allclose(actual.logprobs, 0.0, atol=1e-2)


@pytest.mark.parametrize(
  ("kwargs", "share"),
  [
    (dict(temperature=1.0), [0.4, 0.3, 0.2, 0.1]),
    (dict(temperature=0.5), [16 / 30, 9 / 30, 4 / 30, 1 / 30]),
    (dict(temperature=1.0, top_k=2), [4 / 7, 3 / 7, 0, 0]),
    (dict(temperature=1.0, top_p=0.5), [4 / 7, 3 / 7, 0, 0]),
    (dict(temperature=1.0, top_p=0.8), [4 / 9, 3 / 9, 2 / 9, 0]),
  ],
)
def test_token_frequencies_match_their_logprobs(kwargs, share):
  """Tolerance: 5 standard errors of four shares; false alarm below 1e-5."""
  num = 20000
  logits = jnp.broadcast_to(jnp.log(jnp.array([0.4, 0.3, 0.2, 0.1])), (num, 4))
  token, logprob = sampling.sample_token(
    logits, jax.random.uniform(jax.random.key(0), (num,)), **kwargs
  )
  share = np.array(share)
  seen = np.bincount(token, minlength=4) / num
  assert (np.abs(seen - share) <= 5 * np.sqrt(share * (1 - share) / num)).all()
  np.testing.assert_allclose(
    np.exp(logprob), share[np.asarray(token)], rtol=1e-4
  )


@pytest.mark.parametrize(
  "options",
  [
    {"temperature": -1.0},
    {"temperature": 1e-30},
    {"top_p": 0.0},
    {"top_p": 1.5},
    {"top_k": 99},
    {"max_tokens": 0},
    {"group_size": 0},
    {"num_slots": -3},
  ],
)
def test_numbers_out_of_range_are_rejected(options):
  (name, value), *_ = options.items()
  with pytest.raises(UserError, match=f"{name} is {value} but must be"):
    _sample(_prompts(2), **options)


def test_inverted_cdf_has_exact_frequencies():
  """All multiples of 1/4096, over two blocks of the vocabulary and a part."""
  counts = np.zeros(300, np.int64)
  rng = np.random.default_rng(0)
  at = rng.choice(300, 40, replace=False)
  counts[at] = rng.multinomial(4096, np.full(40, 1 / 40))
  uniform = jnp.arange(4096, dtype=jnp.float32) / 4096
  probs = jnp.broadcast_to(jnp.array(counts / 4096, jnp.float32), (4096, 300))
  tokens, _ = jax.jit(sampling._invert_cdf)(probs, uniform)
  np.testing.assert_array_equal(np.bincount(tokens, minlength=300), counts)


def test_a_token_of_probability_0_is_never_sampled():
  """Covers the largest uniform number, with sums that round."""
  rng = np.random.default_rng(0)
  probs = rng.exponential(size=(500, 700)) * (rng.random((500, 700)) < 0.1)
  probs = jnp.array(probs / probs.sum(-1, keepdims=True), jnp.float32)
  for uniform in (0.0, 2.0**-23, 1 - 2.0**-23):
    tokens, _ = sampling._invert_cdf(probs, jnp.full((500,), uniform))
    assert (jnp.take_along_axis(probs, tokens[:, None], 1) > 0).all()


def test_gpus_sample_from_the_same_distribution():
  """Their formula only rounds differently."""
  rng = np.random.default_rng(0)
  logits = jnp.array(3 * rng.normal(size=(200, 700)), jnp.float32)
  logits = jnp.where(rng.random(logits.shape) < 0.3, -jnp.inf, logits)
  uniform = jnp.array(rng.random(200), jnp.float32)
  want, want_logprob = sampling._sample_by_prob(logits, uniform)
  token, logprob = sampling._sample_by_weight(logits, uniform)
  np.testing.assert_array_equal(token, want)
  np.testing.assert_allclose(logprob, want_logprob, rtol=1e-5)
  assert len(set(token.tolist())) > 50


@pytest.mark.slow
def test_slots_are_busy_on_geometric_lengths():
  """Uniform scores stop each token with chance 1/16; 4 completions a slot."""
  uniform = jax.tree.map(np.zeros_like, _params())
  prompts = small.prompts(32)
  actual = _sample(
    prompts, params=uniform, group_size=8, max_tokens=128, num_slots=64
  )
  lengths = np.asarray(actual.lengths)
  assert 13 < lengths.mean() < 19 and lengths.max() > 60
  assert lengths.sum() / int(actual.slot_steps) > 0.87


def test_a_longer_limit_continues_truncated_completions():
  short, long = _sample(_prompts()), _sample(_prompts(), max_tokens=20)
  np.testing.assert_array_equal(short.tokens, long.tokens[:, :, :12])
  assert (long.lengths > 12).any()


def test_weights_for_decoding_are_gathered_over_the_data_axis():
  """Gathered once, not by every program; the model axis still splits them."""
  mesh = sharding.make_mesh(4, 2)
  places = parameters.inference_shardings(small.MODEL, mesh)
  to_inference_params = functools.partial(
    parameters.to_inference_params, config=small.MODEL
  )
  params = jax.device_put(
    small.params(), parameters.shardings(small.MODEL, mesh)
  )
  weights = jax.jit(to_inference_params, out_shardings=places)(params)
  chex.assert_trees_all_equal(weights, to_inference_params(small.params()))
  copies = {
    8 * x.addressable_shards[0].data.size // x.size
    for x in jax.tree.leaves(weights)
  }
  assert copies == {4, 8}


def test_kept_prompts_are_divided_evenly():
  keep = jnp.array([False, True, True, False, True, True, False, True])
  place = np.asarray(generate._balance_shards(keep, 4))
  assert sorted(place) == list(range(8))
  per_shard = np.bincount(place[np.asarray(keep)] // 2, minlength=4)
  assert per_shard.max() - per_shard.min() <= 1


@pytest.mark.parametrize("sizes", [None, [3, 6, 16]])
def test_paddings_and_parts_of_the_cache_do_not_change_tokens(
  monkeypatch, sizes
):
  """In parts of `sizes`, prompts reach into the second, completions the last.

  Prefill works in chunks; five prompts are no multiple of two.
  """
  want = _sample(_prompts())
  if sizes:
    monkeypatch.setattr(kv_cache, "part_sizes", lambda capacity: sizes)
  monkeypatch.setattr(kv_cache, "_SHORTEST", 2)
  _sampler.cache_clear()
  prompts = PromptBatch(*(x[:5] for x in jax.tree.leaves(_prompts())))
  actual = _sample(prompts)
  _sampler.cache_clear()
  np.testing.assert_array_equal(actual.tokens, want.tokens[:5])
  np.testing.assert_allclose(actual.logprobs, want.logprobs[:5], atol=1e-5)


def test_ties_at_the_last_place_add_no_tokens():
  uniform = jnp.arange(64, dtype=jnp.float32) / 64
  logits = jnp.zeros((64, 4))
  token, logprob = sampling.sample_token(logits, uniform, 1.0, top_k=2)
  np.testing.assert_array_equal(np.bincount(token, minlength=4), [32, 32, 0, 0])
  np.testing.assert_allclose(np.exp(logprob), 0.5, rtol=1e-6)
