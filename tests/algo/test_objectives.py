"""The surrogate against hand-computed values, and its grads."""

import functools

import hypothesis
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dppo_jax.algo import objectives, policy_loss

GRPO = objectives.grpo(clip_low=0.2, clip_high=0.3)
SEQUENCE = objectives.gspo(clip_low=0.2, clip_high=0.3)
EVERY = {name: make() for name, make in objectives.OBJECTIVES.items()}
LOW, HIGH = 0.1, 0.15
ACTIVE = {  # bounds that random ratios cross, and a penalty
  name: make(beta=0.3) if name == "rloo" else make(LOW, HIGH, beta=0.3)
  for name, make in objectives.OBJECTIVES.items()
}
each = pytest.mark.parametrize("objective", EVERY.values(), ids=EVERY.keys())
each_active = pytest.mark.parametrize(
  "objective", ACTIVE.values(), ids=ACTIVE.keys()
)


@functools.partial(jax.jit, static_argnums=0)
def _differentiate(objective, logprobs, fields):
  value = lambda x: policy_loss.surrogate(objective, x, **fields)
  return jax.value_and_grad(value, has_aux=True)(logprobs)


def _surrogate(objective, logprobs, **fields):
  """Loss sum, grads and info; by default 1 sequence of 1s, old policy 0."""
  logprobs = np.asarray(logprobs, np.float32)
  default = {
    "old_logprobs": np.zeros(logprobs.shape),
    "advantages": np.ones(logprobs.shape),
    "weights": np.ones(logprobs.shape),
    "is_trained": np.ones(logprobs.shape, bool),
    "segment_ids": np.ones(logprobs.shape, int),
  }
  dtypes = {"f": np.float32, "i": np.int32, "b": bool}
  fields = {
    name: np.asarray(x).astype(dtypes[np.asarray(x).dtype.kind])
    for name, x in (default | fields).items()
  }
  (loss, info), grad = _differentiate(objective, logprobs, fields)
  return np.asarray(loss), np.asarray(grad), info


def _one(objective, ratio, advantage, weight=1.0, **fields):
  """Loss and grad of one token."""
  fields = {name: [[x]] for name, x in fields.items()}
  loss, grad, _ = _surrogate(
    objective,
    [[np.log(ratio)]],
    advantages=[[float(advantage)]],
    weights=[[weight]],
    **fields,
  )
  return loss, grad[0, 0]


@pytest.mark.parametrize(
  ("ratio", "advantage", "loss", "grad"),
  [
    (1.0, 2.0, -2.0, -2.0),  # on policy: the grad is -advantage
    (1.0, -2.0, 2.0, 2.0),
    (1.25, 2.0, -2.5, -2.5),  # inside both bounds
    (1.5, 2.0, -2.6, 0.0),  # above 1.3, and going up would pay nothing
    (1.5, -2.0, 3.0, 3.0),  # above, but the way back is open
    (0.5, 2.0, -1.0, -1.0),
    (0.5, -2.0, 1.6, 0.0),  # below 0.8
    (0.5, 0.0, 0.0, 0.0),
  ],
)
@pytest.mark.parametrize("objective", [GRPO, SEQUENCE])
def test_clipping_by_hand(objective, ratio, advantage, loss, grad):
  """A sequence of one token has the token's ratio."""
  actual = _one(objective, ratio, advantage)
  np.testing.assert_allclose(actual, (loss, grad), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["clip_low", "clip_high"])
@pytest.mark.parametrize("make", [objectives.grpo, objectives.gspo])
def test_ratio_at_a_bound_has_the_full_gradient(make, name):
  """At it, not half as with `jnp.clip`; one step of rounding beyond, none."""
  advantage = 1.0 if name == "clip_high" else -1.0
  logprob = {"clip_low": -0.3, "clip_high": 0.3}[name]
  wide = make(clip_low=1e9, clip_high=1e9)
  ratio = np.float32(-_one(wide, np.exp(logprob), advantage)[0] * advantage)
  towards_one = np.nextafter(ratio, np.float32(1.0))
  for bound, expected in ((ratio, ratio), (towards_one, 0.0)):
    args = {"clip_low": 0.5, "clip_high": 0.5, name: abs(float(bound) - 1)}
    loss, grad = _one(make(**args), np.exp(logprob), advantage)
    assert loss == -bound * advantage
    assert grad == -expected * advantage


@each_active
@pytest.mark.parametrize("ratio", [0.5, 1.0, 1.2, 1.5])
@pytest.mark.parametrize("advantage", [-2.0, 2.0])
def test_weighting_the_term_is_weighting_the_advantage(
  objective, ratio, advantage
):
  plain = objective._replace(beta=0.0)
  folded = _one(plain, ratio, 3 * advantage)
  outside = _one(plain, ratio, advantage, weight=3.0)
  np.testing.assert_allclose(folded, outside, rtol=1e-6)


def test_an_advantage_of_zero_is_never_clipped():
  logprobs = np.log([[0.5, 1.5, 9.0]])
  info = _surrogate(GRPO, logprobs, advantages=[[0.0, 0.0, 0.0]])[2]
  assert info["tokens"] == 3 and info["clipped"] == 0


def test_kl_by_hand():
  # The reference gives the token half of the policy's probability.
  half = np.log(0.5)
  kl = 0.5 - half - 1
  loss, grad = _one(objectives.grpo(beta=0.1), 1.0, 2.0, ref_logprobs=half)
  np.testing.assert_allclose(loss, -2.0 + 0.1 * kl, rtol=1e-6)
  np.testing.assert_allclose(grad, -2.0 + 0.1 * (1 - 0.5), rtol=1e-6)
  # It carries the weight too, and stays where the ratio is clipped.
  actual = _one(objectives.grpo(beta=0.1), 1.5, 2.0, 3.0, ref_logprobs=half)
  kl = 1 / 3 - np.log(1 / 3) - 1
  np.testing.assert_allclose(
    actual, (3 * (-2.4 + 0.1 * kl), 3 * 0.1 * (1 - 1 / 3)), rtol=1e-5
  )


def test_another_kl_has_the_gradient_of_the_divergence_itself():
  """Half of the squared difference, averaged over the policy's tokens."""
  k2 = objectives.rloo(beta=1.0)._replace(
    kl=lambda logprobs, ref: jnp.square(logprobs - ref) / 2
  )
  reference = np.log(np.float32([0.7, 0.2, 0.1]))
  logits = np.float32([0.3, -0.2, 0.5])

  def divergence(logits):
    logprobs = jax.nn.log_softmax(logits)
    return (jnp.exp(logprobs) * (logprobs - reference)).sum()

  def penalty(logits):
    logprobs = jax.nn.log_softmax(logits)
    constant = jax.lax.stop_gradient(logprobs)
    fields = {
      "old_logprobs": constant[:, None],
      "advantages": jnp.zeros((3, 1)),
      "weights": jnp.exp(constant)[:, None],
      "is_trained": jnp.ones((3, 1), bool),
      "ref_logprobs": jnp.asarray(reference)[:, None],
    }
    return policy_loss.surrogate(k2, logprobs[:, None], **fields)[0]

  actual, want = jax.grad(penalty)(logits), jax.grad(divergence)(logits)
  np.testing.assert_allclose(actual, want, rtol=1e-5)


def test_kl_averages_to_the_divergence():
  policy = np.array([0.5, 0.3, 0.2], np.float32)
  reference = np.array([0.2, 0.2, 0.6], np.float32)
  kl = jax.jit(policy_loss.kl_k3)(np.log(policy), np.log(reference))
  exact = (policy * np.log(policy / reference)).sum()
  np.testing.assert_allclose((policy * np.asarray(kl)).sum(), exact, rtol=1e-5)


def _rows(seed, num=3, length=12):
  """Rows of three sequences each, prompts and padding between completions."""
  rng = np.random.default_rng(seed)
  shape = (num, length)
  ids = np.broadcast_to(np.array([1] * 5 + [2] * 4 + [3] * 2 + [0]), shape)
  per_sequence = rng.normal(0, 1, (num, 4)).astype(np.float32)
  old = rng.normal(-2, 0.5, shape)
  return old + rng.normal(0, 0.2, shape), {
    "old_logprobs": old,
    "advantages": np.take_along_axis(per_sequence, ids, axis=1),
    "weights": rng.uniform(0.5, 2, shape) * (rng.random(shape) < 0.8),
    # The first column of a sequence predicts a token of its prompt.
    "is_trained": (ids > 0) & ~np.isin(np.arange(length), [0, 5, 9]),
    "segment_ids": ids,
    "ref_logprobs": old + rng.normal(0, 0.3, shape),
  }


def _by_loops(name, logprobs, fields):
  """Loss, grads and info of rows, in the words of the papers."""
  loss, grads = 0.0, np.zeros(logprobs.shape)
  info = {"tokens": 0, "clipped": 0, "kl": 0.0}
  log_ratio = logprobs - fields["old_logprobs"]
  for r, c in np.ndindex(logprobs.shape):
    at = lambda name, r=r, c=c: fields[name][r, c]
    if not at("is_trained") or at("weights") == 0:
      continue
    a = at("advantages")
    mine = (fields["segment_ids"][r] == at("segment_ids")) & (
      fields["is_trained"][r]
    )
    is_open = True
    sequence = log_ratio[r][mine].mean()
    ratio = np.exp(sequence if name == "gspo" else log_ratio[r, c])
    if name == "rloo":
      value, slope = a * logprobs[r, c], a
    else:
      bounded = np.clip(ratio, 1 - LOW, 1 + HIGH)
      if name == "cispo":
        value, slope = bounded * a * logprobs[r, c], bounded * a
        is_open = bounded == ratio
      else:
        value = min(ratio * a, bounded * a)
        is_open = value == ratio * a
        slope = is_open * ratio * a
    d = at("ref_logprobs") - logprobs[r, c]
    kl = np.exp(d) - d - 1
    loss += at("weights") * (0.3 * kl - value)
    grads[r, c] = at("weights") * (0.3 * (1 - np.exp(d)) - slope)
    info["tokens"] += 1
    info["clipped"] += not is_open
    info["kl"] += kl
  return loss, grads, info


@pytest.mark.parametrize("name", ACTIVE)
@pytest.mark.parametrize("seed", range(3))
def test_packed_rows_against_loops(name, seed):
  """A sequence's ratio is over all its tokens, those of weight 0 too."""
  logprobs, fields = _rows(seed)
  loss, grads, info = _surrogate(ACTIVE[name], logprobs, **fields)
  expected = _by_loops(name, logprobs, fields)
  np.testing.assert_allclose(loss, expected[0], rtol=1e-5)
  np.testing.assert_allclose(grads, expected[1], rtol=1e-5, atol=1e-6)
  if name != "rloo":
    assert 0 < expected[2]["clipped"] < expected[2]["tokens"]
  for name, value in expected[2].items():
    np.testing.assert_allclose(info[name], value, rtol=1e-5)


def test_without_bounds_cispo_has_the_gradient_of_dapo():
  wide = {"clip_low": 1e9, "clip_high": 1e9}
  pair = objectives.cispo(**wide), objectives.dapo(**wide)
  logprobs, fields = _rows(0)
  grads = [_surrogate(x, logprobs, **fields)[1] for x in pair]
  np.testing.assert_allclose(*grads, rtol=1e-5)


def test_rloo_is_dr_grpo_in_other_units():
  """At a ratio of 1, with the groups' advantages: G / (G - 1) times as much."""
  rewards = jnp.array([[1.0, 0.0, 0.0, 0.5]])
  rloo, centred = objectives.rloo(), objectives.dr_grpo()
  actual = rloo.advantage(rewards)
  np.testing.assert_allclose(actual, centred.advantage(rewards) * 4 / 3)
  logprobs, fields = _rows(1)
  fields["old_logprobs"] = logprobs
  grads = [_surrogate(x, logprobs, **fields)[1] for x in (rloo, centred)]
  np.testing.assert_allclose(*grads, rtol=1e-6)


def test_custom_token_loss():
  """Squares of ratios; weights and penalty are still applied."""

  def squares(ratio, advantages, logprobs):
    return -jnp.square(ratio) * advantages, ratio > 2.0

  mine = objectives.grpo(beta=0.1)._replace(token_loss=squares)
  half = np.log(0.5)
  actual = _one(mine, 1.5, 2.0, 3.0, ref_logprobs=half)
  kl = 1 / 3 - np.log(1 / 3) - 1
  want = (3 * (-4.5 + 0.1 * kl), 3 * (-9.0 + 0.1 * (1 - 1 / 3)))
  np.testing.assert_allclose(actual, want, rtol=1e-5)
  wrong = mine._replace(token_loss=lambda ratio, *_: ratio.sum(keepdims=True))
  with pytest.raises(ValueError, match=r"must return \(loss, is_clipped\)"):
    _one(wrong, 1.0, 1.0, ref_logprobs=half)


@each_active
def test_plain_arrays_are_rows_of_one_sequence_each(objective):
  logprobs, fields = _rows(2)
  dtype = {"f": jnp.float32, "b": bool, "i": jnp.int32}
  fields = {k: jnp.array(v, dtype[v.dtype.kind]) for k, v in fields.items()}
  logprobs = jnp.array(logprobs, jnp.float32)
  of_row = {
    "advantages": jnp.array([1.0, -0.5, 0.0]),
    "weights": jnp.array([0.5, 2.0, 1.0]),
  }
  spread = {k: jnp.repeat(x[:, None], 12, axis=1) for k, x in of_row.items()}
  ids = jnp.ones(logprobs.shape, jnp.int32)
  packed = fields | spread | {"segment_ids": ids}
  want = policy_loss.surrogate(objective, logprobs, **packed)
  del fields["segment_ids"]
  actual = policy_loss.surrogate(objective, logprobs, **fields | of_row)
  jax.tree.map(np.testing.assert_array_equal, actual, want)


def test_sequence_gradient_is_that_of_the_clipped_mean_ratio():
  """The token form against the sequence form, differentiated."""
  logprobs, fields = _rows(0, num=1)
  fields = {k: np.asarray(v) for k, v in fields.items() if k != "ref_logprobs"}
  fields["weights"] = np.ones(logprobs.shape)
  mine = [np.arange(1, 5), np.arange(6, 9), np.array([10])]

  def sequence_form(x):
    total = 0.0
    for column in mine:
      old = jnp.array(fields["old_logprobs"][0, column], jnp.float32)
      s = jnp.exp((x[0, column] - old).mean())
      a = float(fields["advantages"][0, column[0]])
      total -= len(column) * jnp.minimum(s * a, jnp.clip(s, 0.8, 1.3) * a)
    return total

  expected = jax.jit(jax.value_and_grad(sequence_form))(
    logprobs.astype(np.float32)
  )
  actual = _surrogate(SEQUENCE, logprobs, **fields)[:2]
  jax.tree.map(
    functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6),
    actual,
    expected,
  )


@each
def test_gradient_at_ratio_1_is_the_weighted_advantage(objective):
  logprobs, fields = _rows(1)
  fields["old_logprobs"] = logprobs
  _, grads, info = _surrogate(objective, logprobs, **fields)
  expected = -fields["advantages"] * fields["weights"] * fields["is_trained"]
  np.testing.assert_allclose(grads, expected, rtol=1e-6)
  assert info["clipped"] == 0


@each_active
@hypothesis.settings(max_examples=25)
@hypothesis.given(st.permutations(range(4)), st.integers(0, 100))
def test_position_of_a_sequence_has_no_effect(objective, order, seed):
  """Four sequences side by side, in two rows, in any order."""
  rng = np.random.default_rng(seed)
  lengths = [2, 3, 4, 1]
  old = [rng.normal(-2, 0.5, n) for n in lengths]
  new = [x + rng.normal(0, 0.2, len(x)) for x in old]
  signs, weights = rng.normal(0, 1, 4), rng.uniform(0.5, 2, 4)

  def lay(order):
    row = {name: np.zeros((2, 8)) for name in ("x", "old_logprobs", "weights")}
    row |= {name: np.zeros((2, 8)) for name in ("advantages", "ref_logprobs")}
    ids, fields = np.zeros((2, 8), int), {}
    for place, s in enumerate(order):
      r, start = place // 2, lengths[order[place - 1]] if place % 2 else 0
      at = fields[s] = (r, np.arange(start, start + lengths[s]))
      row["x"][at], row["old_logprobs"][at] = new[s], old[s]
      row["ref_logprobs"][at] = old[s] + 0.1
      row["weights"][at], row["advantages"][at] = weights[s], signs[s]
      ids[at] = place % 2 + 1
    loss, grads, _ = _surrogate(
      objective, row.pop("x"), is_trained=ids > 0, segment_ids=ids, **row
    )
    return loss, [grads[fields[s]] for s in range(4)]

  loss, grads = lay(order)
  expected_loss, expected_slopes = lay(range(4))
  np.testing.assert_allclose(loss, expected_loss, rtol=1e-5, atol=1e-5)
  for actual, expected in zip(grads, expected_slopes, strict=True):
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


@each_active
def test_uncounted_positions_cannot_poison_the_sum(objective):
  """Prompts and padding hold anything; tokens of weight 0 hold numbers."""
  logprobs, fields = _rows(2)
  clean = _surrogate(objective, logprobs, **fields)
  outside = ~fields["is_trained"]
  names = ("old_logprobs", "ref_logprobs")
  strange = fields | {n: np.where(outside, np.nan, fields[n]) for n in names}
  strange["weights"] = np.where(outside, np.inf, fields["weights"])
  actual = _surrogate(objective, np.where(outside, np.nan, logprobs), **strange)
  jax.tree.map(np.testing.assert_array_equal, actual, clean)
  unweighted = fields["is_trained"] & (fields["weights"] == 0)
  assert unweighted.any()
  if objective.is_sequence_ratio:
    names = names[1:]  # a sequence's ratio needs all of its tokens
  for number in (0.0, -1e30):
    if not objective.is_sequence_ratio:
      logprobs = np.where(unweighted, number, logprobs)
    other = fields | {n: np.where(unweighted, number, fields[n]) for n in names}
    actual = _surrogate(objective, logprobs, **other)
    jax.tree.map(np.testing.assert_array_equal, actual, clean)


@each
def test_extreme_ratios_stay_finite(objective):
  objective = objective._replace(beta=0.1)
  far = np.array([[-1e4, 1e4, -1e4, 1e4]])
  loss, grads, _ = _surrogate(
    objective,
    far,
    advantages=[[1.0, 1.0, -1.0, -1.0]],
    segment_ids=[[1, 2, 3, 4]],
    ref_logprobs=-far,
  )
  assert np.isfinite(loss) and np.isfinite(grads).all()


def test_sampler_correction_is_capped_and_constant():
  """The correction has no gradient, although it depends on the policy."""
  old = jnp.log(jnp.full(4, 0.9))
  sampler = jnp.log(jnp.array([0.9, 0.6, 0.3, 1.8]))
  correct = lambda old: policy_loss.sampler_correction(old, sampler, 2.0)
  np.testing.assert_allclose(correct(old), [1.0, 1.5, 2.0, 0.5], rtol=1e-5)
  assert (jax.grad(lambda old: correct(old).sum())(old) == 0).all()
  far = jnp.array([-1e4, 1e4])
  assert np.isfinite(policy_loss.sampler_correction(far, -far, 2.0)).all()
