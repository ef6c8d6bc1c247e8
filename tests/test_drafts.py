"""Drafts: what is guessed, and that guesses change no token."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dppo_jax import rollout, train
from dppo_jax.files import jsonl
from dppo_jax.records import Selection
from dppo_jax.rollout import drafts
from dppo_jax.step.draft_choice import RETRY, DraftChoice
from tests.helpers import commands, small


@pytest.mark.parametrize(
  ("draft_tokens", "options"),
  [
    (1, {}),
    (7, {}),
    (3, dict(temperature=0.0)),
    (3, dict(temperature=0.3, top_k=3, top_p=0.9, stop_ids=(small.STOP, 7))),
    (7, dict(num_slots=1, max_tokens=3)),
    (2, dict(num_slots=24, platform="gpu")),
  ],
)
def test_drafts_change_no_token(draft_tokens, options):
  """Later stages guess more; prompts are pruned and slots refilled."""
  prompts, keep = small.prompts(6), jnp.array([1, 0, 1, 1, 1, 1]) > 0
  args = dict(
    model_config=small.MODEL,
    group_size=4,
    max_tokens=12,
    num_slots=4,
    stop_ids=(small.STOP,),
    platform="cpu",
  )

  def sample(num):
    sampler = functools.partial(
      rollout.sample, draft_tokens=num, **args | options
    )
    kept = Selection(keep, jnp.full(6, 0.5))
    key = jax.random.key(5)
    return jax.jit(sampler)(small.params(), prompts=prompts, rng=key, kept=kept)

  want, actual = sample(0), sample(draft_tokens)
  np.testing.assert_array_equal(actual.tokens, want.tokens)
  np.testing.assert_array_equal(actual.lengths, want.lengths)
  np.testing.assert_array_equal(actual.is_stopped, want.is_stopped)
  np.testing.assert_allclose(actual.logprobs, want.logprobs, atol=1e-5)
  assert actual.busy_steps < want.busy_steps == want.lengths.sum()


def _find(prompt, group, member, num):
  """Returns what followed the longest match; completions come first."""
  rows = [[*prompt[-drafts.LONGEST :], *x] for x in group]
  written, best, guess = rows[member], 0, None
  for text in (*rows, prompt):
    for i in range(1, len(text)):
      length = 0
      while length < min(drafts.LONGEST, i) and (
        text[i - 1 - length] == written[-1 - length]
      ):
        length += 1
      if length > best:
        best, guess = length, text[i : i + num]
  return guess


def test_drafts_follow_the_longest_match():
  """Few different tokens, for many matches of each length."""
  rng, matched = np.random.default_rng(0), 0
  find = jax.jit(drafts.find, static_argnames="num")
  for _ in range(300):
    prompt = rng.integers(2, 6, rng.integers(4, 9)).tolist()
    group = [rng.integers(2, 6, rng.integers(0, 10)).tolist() for _ in range(3)]
    member, tokens = int(rng.integers(3)), np.full((3, 12), -1)
    for row, x in zip(tokens, group, strict=True):
      row[: len(x)] = x
    padded = np.zeros(9, int)
    padded[: len(prompt)] = prompt
    (actual,) = find(
      jnp.array([padded]),
      jnp.array([len(prompt)]),
      jnp.array([tokens]),
      jnp.array([member]),
      jnp.array([len(group[member])]),
      num=3,
    )
    want = _find(prompt, group, member, 3)
    if want:
      assert actual[: len(want)].tolist() == want
      matched += 1
  assert matched > 250


def test_the_faster_program_is_chosen_and_the_slower_one_retried():
  choice, seconds = DraftChoice(["a", "b"]), {"a": 2.0, "b": 1.0}
  names = []
  for i in range(5 * RETRY):
    if i == 2 * RETRY:  # from here on the other one is faster
      seconds["a"] = 0.1
    names.append(choice.next())
    choice.add(names[-1], seconds[names[-1]], 10)
  slower = [i for i, name in enumerate(names[: 4 * RETRY]) if name == "a"]
  assert slower == [0, RETRY]
  assert names[4 * RETRY :] == ["a"] * RETRY


def test_automatic_drafts_change_only_the_speed_of_a_run(tmp_path):
  runs = []
  for num in (0, -1):
    options = {
      "steps": 5,
      "data__prompts_per_step": 4,
      "rollout__max_tokens": 8,
      "rollout__num_slots": 4,
      "rollout__draft_tokens": num,
      "model__shape__layers": 1,
      "sft__steps": 0,
      "data__eval": "",
    }
    train.run(commands.config("arithmetic", **options), tmp_path / str(num))
    lines = jsonl.read(tmp_path / str(num) / "metrics.jsonl")
    runs.append([x for x in lines if "reward/mean" in x])
  ratios = [x.pop("rollout/tokens_per_step") for x in runs[1]]
  assert ratios[0] == 1 and max(ratios) > 1
  for plain, with_drafts in zip(*runs, strict=True):
    for name, value in with_drafts.items():
      if not name.endswith("seconds") and name != "rollout/slot_utilisation":
        assert value == pytest.approx(plain[name], rel=1e-4), name
