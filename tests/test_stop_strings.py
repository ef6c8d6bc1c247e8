"""Stop strings: a completion is what was sampled up to the first of them."""

import jax
import numpy as np
import pytest

from dppo_jax import data
from dppo_jax.errors import UserError
from dppo_jax.rng import rng_at
from dppo_jax.run.setup import setup_run
from dppo_jax.step import abstract_values
from dppo_jax.step.grade import until_stop
from dppo_jax.step.train_step import TrainStep
from tests.helpers import commands

SETTINGS = {
  "model__shape__layers": 1,
  "model__shape__embed": 16,
  "model__shape__mlp": 32,
  "model__shape__head_dim": 8,
  "data__train": "arithmetic:32:1",
  "data__eval": "",
  "data__prompts_per_step": 16,
  "rollout__group_size": 4,
  "rollout__max_tokens": 24,
  "pack__row_length": 40,
}
STOPS = ("=", "12", "3+", "}(")  # one token, or two


def _least(decode, tokens, stops):
  """Number of tokens that first complete a stop string, tried one by one."""
  nums = range(1, len(tokens) + 1)
  return next(
    (n for n in nums if any(x in decode(tokens[:n]) for x in stops)), 0
  )


@pytest.mark.parametrize("size", [1, 2, 3])
def test_completions_are_cut_where_the_fewest_tokens_complete_a_stop(size):
  """Tokens of several characters may complete a stop string in their middle."""
  rng = np.random.default_rng(size)
  words = ["".join(rng.choice([*"abc"], size)) for _ in range(9)]
  decode = lambda tokens: "".join(words[i] for i in tokens)
  num_cut = 0
  for _ in range(200):
    stops = ["".join(rng.choice([*"abc"], rng.integers(1, 6))) for _ in "xy"]
    tokens = rng.integers(0, len(words), 8)
    text, num, is_stopped = until_stop(decode, tokens, stops)
    want = _least(decode, tokens, stops)
    assert (num, is_stopped) == (want or 8, bool(want))
    assert decode(tokens[:num]).startswith(text)
    assert not any(x in text for x in stops)
    if is_stopped:
      removed = decode(tokens[:num]).removeprefix(text)
      assert any(removed.startswith(x) for x in stops)
    num_cut += is_stopped
  assert 20 < num_cut < 200
  assert until_stop(decode, tokens, ()) == (decode(tokens), 8, False)


@pytest.mark.slow
def test_a_step_trains_on_the_same_tokens_up_to_the_stop_string():
  batches = {}
  for stops in ((), STOPS):
    c = commands.config(
      "arithmetic:grpo", **SETTINGS, rollout__stop_strings=stops
    )
    run = setup_run(c)
    with jax.set_mesh(run.spec.mesh), run.make_grader() as grader:
      step = TrainStep(run.spec, run.train_set, run.tokenizer, grader)
      state = abstract_values.new_train_state(run.spec, run.initial_params())
      state, experience = step.collect(state)
      shape = experience.rewards.shape
      rewards = np.random.default_rng(0).normal(size=shape).astype(np.float32)
      experience = experience._replace(rewards=rewards)
      rng = rng_at(run.spec.root_key, 0)
      batches[stops] = experience, step.select(rng, experience, state)
  (before, _), (after, (batch,)) = batches[()], batches[STOPS]
  decode, old, new = run.tokenizer.decode, before.rollout, after.rollout
  num_cut = 0
  for at in np.ndindex(shape):
    length, num = int(old.lengths[at]), int(new.lengths[at])
    want = _least(decode, np.asarray(old.tokens[at])[:length], STOPS)
    assert num == (want or length)
    assert new.is_stopped[at] == (bool(want) or bool(old.is_stopped[at]))
    np.testing.assert_array_equal(old.tokens[at][:num], new.tokens[at][:num])
    np.testing.assert_allclose(
      old.logprobs[at][:num], new.logprobs[at][:num], atol=1e-5
    )
    sample = after.samples[np.ravel_multi_index(at, shape)]
    assert sample["tokens"] == num
    assert not any(x in sample["completion"] for x in STOPS)
    np.testing.assert_allclose(
      sample["logprob"], np.asarray(old.logprobs[at])[:num].sum(), rtol=1e-4
    )
    num_cut += bool(want)
  assert num_cut > 20
  assert batch.rows.is_trained.sum() == new.lengths.sum() < old.lengths.sum()
  samples = after.samples
  assert sum(x["tokens"] for x in samples) == new.lengths.sum()
  assert sum(x["stopped"] for x in samples) == new.is_stopped.sum()


def test_a_stop_string_of_one_token_ends_decoding():
  c = commands.config(
    "arithmetic:grpo", **SETTINGS, rollout__stop_strings=STOPS
  )
  tokenizer = data.CharacterTokenizer()
  want = (*tokenizer.stop_ids, *tokenizer.encode("="))
  assert setup_run(c).spec.sampling.stop_ids == want


def test_a_stop_string_of_unknown_characters_is_no_stop_id(monkeypatch):
  """Its only token is that of every unknown character."""
  monkeypatch.setattr(data.CharacterTokenizer, "encode", lambda *unused: [0])
  stops = {"rollout__stop_strings": ("日",)}
  c = commands.config("arithmetic:grpo", **SETTINGS, **stops)
  assert setup_run(c).spec.sampling.stop_ids == (1,)


@pytest.mark.parametrize("stops", [("",), (3,)])
def test_an_invalid_stop_string_is_an_error(stops):
  c = commands.config(
    "arithmetic:grpo", **SETTINGS, rollout__stop_strings=stops
  )
  with pytest.raises(UserError, match="stop_strings"):
    setup_run(c)
