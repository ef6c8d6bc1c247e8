"""What each completion rule keeps, against brute force and closed forms."""

import functools
import itertools

from hypothesis import given
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dppo_jax import methods
from dppo_jax.algo import advantages, designs
from dppo_jax.methods.ranking import fixed_size, round_count
from dppo_jax.records import Groups
from dppo_jax.rng import StepRng

BINARY = np.array(
  [[1, 0, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0], [0] * 6, [1] * 5 + [0]], np.float32
)


def _draw(seed, step=0):
  key = jax.random.key(seed)
  return StepRng(key, jnp.int32(step))


def _groups(values, pruned=(), **others):
  """Groups of given advantages, of which some rows were not rolled out."""
  values = np.array(values, np.float32)
  lengths = np.full(values.shape, 5, np.int32)
  lengths[list(pruned)] = 0
  lengths = others.pop("lengths", lengths)
  others = {name: jnp.array(x) for name, x in others.items()}
  return Groups(
    jnp.array(values), jnp.array(values), jnp.array(lengths), **others
  )


def _choose(rule, groups, seed=0, step=0):
  chosen = jax.jit(rule)(_draw(seed, step), groups)
  return np.asarray(chosen.keep), np.asarray(chosen.prob)


def _many(rule, num=500):
  """The function of groups that makes `num` draws, `[num, Q, G]`."""
  every = jax.random.split(jax.random.key(0), num)
  draws = jax.jit(
    jax.vmap(
      lambda key, groups: rule(StepRng(key, jnp.int32(0)), groups), (0, None)
    )
  )

  def choose(groups):
    chosen = draws(every, groups)
    return np.asarray(chosen.keep), np.asarray(chosen.prob)

  return choose


def _normalized(rewards):
  return np.array(advantages.group_normalized(jnp.array(rewards, jnp.float32)))


def _share_of(num):
  """A share that depends on the step, so that one compilation has them all."""
  return lambda step: step.astype(jnp.float32) / num


STEPWISE = {  # jitted once; the step is the number to keep of 3 x 6 or of 6
  (factory.__name__, scope): jax.jit(factory(_share_of(num), scope))
  for factory in (
    methods.top_abs_advantage,
    methods.max_variance,
  )
  for scope, num in (("group", 6), ("batch", 18))
}


def _stepwise(factory, scope, groups, num, seed=0):
  chosen = STEPWISE[factory.__name__, scope](_draw(seed, num), groups)
  return np.asarray(chosen.keep), np.asarray(chosen.prob)


# Small whole numbers tie often; a third of one is not exact in float32.
VALUES = st.lists(
  st.integers(-4, 4).map(lambda x: x / 3), min_size=18, max_size=18
).map(lambda x: np.array(x, np.float32).reshape(3, 6))


def test_the_batchs_mean_is_over_prompts_that_were_rolled_out():
  rule = methods.drop_small_advantage(0.6, scope="batch")
  values = [[2, -2, 0, 0], [0.5, -0.5, 0.5, -0.5], [9, 9, 9, 9]]
  _, prob = _choose(rule, _groups(values, pruned=[2]))  # mean |A|: 0.75
  np.testing.assert_allclose(prob[0], [1, 1, 0.4, 0.4], rtol=1e-6)
  np.testing.assert_allclose(prob[1], [0.4] * 4, rtol=1e-6)


def test_a_rate_may_change_with_the_step():
  fixed = methods.drop_small_advantage(0.5)
  schedule = lambda step: jnp.where(step < 3, jnp.float32(0.5), 0.0)
  moving = methods.drop_small_advantage(schedule)
  groups = _groups(_normalized(BINARY))
  for early, late in zip(
    _choose(moving, groups, step=2), _choose(fixed, groups), strict=True
  ):
    np.testing.assert_array_equal(early, late)
  keep, prob = _choose(moving, groups, step=3)
  assert keep.all() and (prob == 1).all()


@given(VALUES, st.integers(1, 6))
def test_a_groups_largest_are_kept(values, num):
  rule = methods.top_abs_advantage
  keep, prob = _stepwise(rule, "group", _groups(values), num)
  size = np.abs(values)
  assert (keep.sum(axis=1) == num).all()
  for q in range(3):
    last = np.sort(size[q])[-num]
    above, at = size[q] > last, size[q] == last
    share = (num - above.sum()) / at.sum()
    np.testing.assert_allclose(
      prob[q], np.where(above, 1, np.where(at, share, 0)), rtol=1e-6
    )


@given(VALUES, st.integers(1, 18))
def test_the_batchs_largest_are_kept(values, share):
  rule = methods.top_abs_advantage
  keep, prob = _stepwise(rule, "batch", _groups(values, pruned=[1]), share)
  num = max(share * 12 // 18, 1)
  size = np.abs(values)[[0, 2]]
  assert not keep[1].any() and (prob[1] == 0).all()
  np.testing.assert_allclose(
    np.sort(size[keep[[0, 2]]]), np.sort(size.reshape(-1))[-num:]
  )
  np.testing.assert_allclose(prob.sum(), num, rtol=1e-5)


def test_advantages_equal_on_paper_are_tied():
  """Else the last bits of a group's mean decided which completion is kept."""
  nearly = np.array([[1, 1 + 2e-7, -1, 1 - 1e-7, -1 - 3e-7, 0.9]], np.float32)
  assert len(set(np.abs(nearly[0]))) == 5
  rule = methods.top_abs_advantage(0.5)
  _, prob = _choose(rule, _groups(nearly))
  np.testing.assert_allclose(prob[0], [0.6] * 5 + [0], rtol=1e-6)


@given(VALUES, st.integers(2, 6))
def test_a_groups_subset_has_the_largest_variance(values, num):
  rule = methods.max_variance
  keep, prob = _stepwise(rule, "group", _groups(values), num)
  for q in range(3):
    _check_subset(values[q], keep[q], prob[q], num)


@given(VALUES, st.integers(1, 18), st.integers(0, 2))
def test_the_batchs_subset_has_the_largest_variance(values, share, pruned):
  rule = methods.max_variance
  groups = _groups(values, pruned=[pruned])
  keep, prob = _stepwise(rule, "batch", groups, share)
  rows = [q for q in range(3) if q != pruned]
  assert not keep[pruned].any() and (prob[pruned] == 0).all()
  num = max(share * 12 // 18, 2)
  flat = lambda x: x[rows].reshape(-1)
  _check_subset(flat(values), flat(keep), flat(prob), num)


def _check_subset(values, keep, prob, num):
  """Against all subsets of that size; equal values are equally likely."""
  values = values.astype(np.float64)
  every = np.array(list(itertools.combinations(values, num)))
  assert keep.sum() == num
  best = every.var(axis=1).max()
  np.testing.assert_allclose(values[keep].var(), best, atol=1e-5)
  for value in set(values):
    is_tied = values == value
    share = keep[is_tied].mean()
    np.testing.assert_allclose(prob[is_tied], share, rtol=1e-6)
  ascending = np.sort(values)
  balanced = min(
    (
      high
      for high in range(num + 1)
      if np.isclose(_ends(ascending, high, num).var(), best, atol=1e-6)
    ),
    key=lambda high: (abs(2 * high - num), high),
  )
  np.testing.assert_allclose(
    np.sort(values[keep]), _ends(ascending, balanced, num)
  )


def _ends(ascending, high, num):
  """The lowest `num - high` and the highest `high`."""
  return np.append(ascending[: num - high], ascending[len(ascending) - high :])


def test_a_variance_does_not_drown_in_the_mean():
  """Values around 10000, whose squares float32 cannot tell apart."""
  values = np.array([np.arange(10000, 10006)] * 3, np.float32)
  rule = methods.max_variance
  keep, _ = _stepwise(rule, "group", _groups(values), 4)
  np.testing.assert_array_equal(keep, [[1, 1, 0, 0, 1, 1]] * 3)


@given(VALUES, st.integers(2, 6))
def test_rewards_and_their_advantages_have_the_same_subset(rewards, num):
  rule = methods.max_variance
  by_reward, _ = _stepwise(rule, "group", _groups(rewards), num)
  groups = _groups(_normalized(rewards))
  by_advantage, _ = _stepwise(rule, "group", groups, num)
  np.testing.assert_array_equal(by_reward, by_advantage)


@pytest.mark.parametrize("num_right", range(7))
def test_half_right_and_half_wrong_where_there_are_as_many(num_right):
  rewards = np.zeros((3, 6), np.float32)
  rewards[:, :num_right] = 1
  rule = methods.max_variance
  keep, _ = _stepwise(rule, "group", _groups(_normalized(rewards)), 4)
  expected = np.clip(2, 4 - (6 - num_right), num_right)
  np.testing.assert_array_equal(keep[:, :num_right].sum(axis=1), expected)


@pytest.mark.parametrize("factory, scope", STEPWISE)
def test_a_share_of_one_keeps_everything(factory, scope):
  num = 6 if scope == "group" else 18
  chosen = STEPWISE[factory, scope](
    _draw(0, num), _groups(_normalized(BINARY[:3]))
  )
  assert chosen.keep.all() and (chosen.prob == 1).all()


def test_a_share_is_rounded_down_as_on_paper():
  """In float32, 13/22 of 22 is less than 13."""
  rule = methods.top_abs_advantage(13 / 22)
  values = np.arange(22, dtype=np.float32)[None]
  assert _choose(rule, _groups(values))[0].sum() == 13


DROP = jax.jit(methods.drop_small_advantage(0.6))
NEYMAN = _many(methods.neyman_completions(0.4, min_prob=0.02, coherence=0.1))


def _told(groups):
  """Groups with all that a rule may ask for, for one compilation."""
  length = groups.lengths.astype(jnp.float32)
  return groups.replace(
    is_needed=groups.advantages != 0,
    scale=jnp.ones_like(length),
    sum_sq_residual=length,
  )


PERMUTED = {
  "drop_small_advantage": lambda groups: DROP(_draw(0), groups).prob,
  "neyman": lambda groups: NEYMAN(_told(groups))[1][0],
  **{
    f"{factory} {scope}": functools.partial(
      lambda rule, num, groups: rule(_draw(0, num), groups).prob,
      STEPWISE[factory, scope],
      3 if scope == "group" else 9,
    )
    for factory, scope in STEPWISE
  },
}


@pytest.mark.parametrize("name", PERMUTED)
@given(VALUES, st.permutations(range(6)))
def test_order_within_a_group_does_not_matter(name, values, order):
  """Nor does the last bit by which it changes a group's mean."""
  prob_of, values = PERMUTED[name], _normalized(values)
  prob = np.asarray(prob_of(_groups(values)))
  again = np.asarray(prob_of(_groups(values[:, order])))
  np.testing.assert_allclose(again, prob[:, order], atol=2 / designs.GRID)


RNG = np.random.default_rng(0)
SCORED = _groups(
  RNG.normal(size=(3, 6)),
  lengths=RNG.integers(1, 40, (3, 6), np.int32),
  is_needed=np.ones((3, 6), bool),
  scale=RNG.uniform(0.5, 2, (3, 6)).astype(np.float32),
  sum_sq_residual=RNG.uniform(0, 9, (3, 6)).astype(np.float32),
)


def _without(groups, q):
  """The groups as if prompt `q` had not been rolled out."""
  return groups.replace(lengths=groups.lengths.at[q].set(0))


@pytest.mark.parametrize("proxy", ["length", "residual", "none"])
def test_neyman_is_proportional_to_what_a_completion_adds(proxy):
  if proxy == "length":
    prob = NEYMAN(SCORED)[1][0]
  else:
    rule = methods.neyman_completions(0.4, 0.02, 0.1, proxy)
    _, prob = _choose(rule, SCORED)
  length = np.asarray(SCORED.lengths, np.float64)
  norm = {
    "length": np.sqrt(0.1 * length**2 + length),
    "residual": np.sqrt(0.1 * length**2 + np.asarray(SCORED.sum_sq_residual)),
    "none": length,
  }[proxy]
  size = np.abs(np.asarray(SCORED.advantages)) * np.asarray(SCORED.scale) * norm
  is_between = (prob > 0.021) & (prob < 1)
  assert is_between.sum() > 6 and (prob == 1).any()
  ratio = prob[is_between] / size[is_between]
  np.testing.assert_allclose(ratio, ratio.mean(), rtol=1e-4)
  assert (size[prob == 1] * ratio.mean() >= 1 - 1e-4).all()
  assert (prob >= 0.02).all()
  np.testing.assert_allclose(prob.sum(), 7, rtol=1e-6)  # 0.4 of 18 is 7.2


def test_what_is_not_told_is_one_or_the_length():
  rule = methods.neyman_completions(0.4, 0.02, 0.1, "residual")
  bare = SCORED.replace(scale=None, sum_sq_residual=None, is_needed=None)
  told = SCORED.replace(scale=jnp.ones((3, 6)))
  np.testing.assert_array_equal(_choose(rule, bare)[1], NEYMAN(told)[1][0])


@pytest.mark.parametrize("pruned, num", [(3, 7), (1, 5)])
def test_neyman_keeps_exactly_its_budget_and_alike_ones_apart(pruned, num):
  """0.4 of 18 or 12; of each prompt and sign what is expected, rounded."""
  keep, prob = NEYMAN(_without(SCORED, pruned))
  assert (keep.sum(axis=(1, 2)) == num).all()
  sign = np.sign(np.asarray(SCORED.advantages))
  for q, s in itertools.product(range(3), (-1, 1)):
    is_alike = (sign[q] == s).astype(float)
    expected = (prob[0, q].astype(float) * is_alike).sum()
    found = (keep[:, q] * is_alike).sum(axis=1)
    assert (np.abs(found - expected) < 1).all()
  if pruned < 3:
    assert not keep[:, pruned].any() and (prob[:, pruned] == 0).all()


def test_neyman_is_unbiased_in_many_draws():
  """Tolerance: 5 standard errors of the mean of 500 weighted sums."""
  keep, prob = NEYMAN(SCORED)
  terms = np.asarray(SCORED.advantages) * np.cos(np.arange(18).reshape(3, 6))
  sums = np.where(keep, terms / np.where(keep, prob, 1), 0).sum(axis=(1, 2))
  error = 5 * sums.std() / np.sqrt(len(sums))
  assert 0 < abs(sums.mean() - terms.sum()) <= error < np.abs(terms).sum() / 4


def test_neyman_keeps_all_that_is_needed_where_it_can():
  is_needed = np.zeros((3, 6), bool)
  is_needed[0, :4] = is_needed[2, 3:] = True
  keep, prob = NEYMAN(SCORED.replace(is_needed=jnp.array(is_needed)))
  np.testing.assert_array_equal(keep, np.broadcast_to(is_needed, keep.shape))
  np.testing.assert_array_equal(prob, keep.astype(np.float32))
  nothing = SCORED.replace(is_needed=jnp.zeros((3, 6), bool))
  keep, prob = NEYMAN(nothing)
  assert not keep.any() and (prob == 0).all()


def test_a_budget_of_one_is_every_completion_that_adds_something():
  values = _normalized(BINARY)
  keep, prob = _choose(methods.neyman_completions(1.0), _groups(values, [1]))
  expected = (values != 0) & (np.arange(4) != 1)[:, None]
  np.testing.assert_array_equal(keep, expected)
  np.testing.assert_array_equal(prob, expected.astype(np.float32))


def test_a_needed_completion_of_zero_advantage_has_its_chance():
  groups = SCORED.replace(advantages=SCORED.advantages.at[0].set(0.0))
  keep, prob = NEYMAN(_without(groups, 1))
  np.testing.assert_allclose(prob[0, 0], 0.02, atol=2 / designs.GRID)
  assert (keep.sum(axis=(1, 2)) == 5).all() and keep[:, 0].any(axis=0).all()
  keep, prob = NEYMAN(SCORED.replace(advantages=jnp.zeros((3, 6))))
  assert (keep.sum(axis=(1, 2)) == 7).all()
  np.testing.assert_allclose(prob, 7 / 18, atol=1 / designs.GRID)


def _uniform(budget):
  """A draw of a fixed number without strata, all equally likely."""

  def rule(rng, groups):
    is_drawn = groups.lengths > 0
    num = round_count(budget, is_drawn.sum(dtype=jnp.int32))
    return fixed_size(rng.key, is_drawn.astype(jnp.float32), num)

  return rule


def test_a_draw_of_equal_sizes_keeps_a_fixed_number_with_equal_chances():
  draws = _many(_uniform(0.4))
  for pruned, num in ((3, 7), (1, 5)):
    keep, prob = draws(_without(SCORED, pruned))
    is_drawn = np.arange(3)[:, None] != pruned
    assert (keep.sum(axis=(1, 2)) == num).all()
    share = np.where(is_drawn, num / (is_drawn.sum() * 6), 0)
    share = np.broadcast_to(share, prob.shape)
    np.testing.assert_allclose(prob, share, atol=1 / designs.GRID)
    # No stratification: how many a prompt keeps is not fixed by its share.
    assert len(set(keep[:, 0].sum(axis=1))) > 3


def test_the_smallest_budget_keeps_one():
  keep, prob = _choose(_uniform(0.001), SCORED)
  assert keep.sum() == 1 and prob[keep] > 0


def test_unweighted_is_the_mean_over_what_was_kept():
  rule = methods.drop_small_advantage(0.6)
  groups = _groups(_normalized(BINARY), pruned=[1])
  honest, _ = _choose(rule, groups, seed=3)
  keep, prob = _choose(methods.unweighted(rule), groups, seed=3)
  np.testing.assert_array_equal(keep, honest)
  drawn = np.array([0, 2, 3])
  terms = np.random.default_rng(0).normal(size=keep.shape)[drawn]
  found = (terms / prob[drawn])[keep[drawn]].sum() / terms.size
  np.testing.assert_allclose(found, terms[keep[drawn]].mean(), rtol=1e-6)


@pytest.mark.parametrize(
  "make, value",
  [
    (lambda: methods.top_abs_advantage(0.0), "0.0"),
    (lambda: methods.max_variance(1.5), "1.5"),
    (lambda: methods.neyman_completions(float("nan")), "nan"),
    (lambda: methods.neyman_completions(0.5, min_prob=2.0), "2.0"),
    (lambda: methods.neyman_completions(0.5, coherence=-1.0), "-1.0"),
    (lambda: methods.neyman_completions(0.5, proxy="size"), "'size'"),
    (
      lambda: methods.neyman_completions(0.5, proxy="surprise"),
      "'surprise'.*'residual'",
    ),
    (lambda: methods.dppo(total_steps=-1), "total_steps is -1.*at least 0"),
    (lambda: methods.d3s(final_keep=0.0), "final_keep is 0.0"),
    (lambda: methods.greso(max_draws=0), "max_draws is 0.*at least 1"),
    (lambda: methods.greso(is_weighted=True), "'plain'.*is_weighted"),
    (lambda: methods.neyman(kappa=float("inf")), "kappa is inf.*finite"),
    (lambda: methods.neyman(prior=0.0), r"prior is \(0.0, 0.0\).*above 0"),
    (lambda: methods.max_variance(0.5, "row"), "'row'"),
    (lambda: methods.drop_small_advantage(0.5, "all"), "'all'"),
  ],
)
def test_what_cannot_be_meant_is_refused(make, value):
  with pytest.raises(ValueError, match=f"{value}.*method.args"):
    make()
