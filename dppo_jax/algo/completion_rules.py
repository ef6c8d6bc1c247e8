"""Which completions to train on: factories of `rule(draw, groups)`.

A rule returns a `Selection[Q, G]`. It looks at the whole group before anything
is dropped, and the probability it reports is that of the draw it makes; where
weights 1 / prob still leave a bias, its docstring says so. Completions of
length 0 belong to prompts that were not rolled out and are not counted.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from dppo_jax.algo import designs
from dppo_jax.keys import Draw
from dppo_jax.records import Groups, Selection

CompletionRule = Callable[[Draw, Groups], Selection]
# A number, or a function of the step so that it can change over the run.
Share = float | Callable[[Int[Array, ""]], Float[Array, ""]]

# Advantages that are equal on paper differ in the last bits of a float32.
ROUNDING = 1e-5
# Least size, relative to the largest, of a completion that is needed.
LEAST_SIZE = 1e-6


def every_completion() -> CompletionRule:
  """Keeps all, with probability 1."""

  def rule(draw: Draw, groups: Groups) -> Selection:
    shape = groups.advantages.shape
    return Selection(jnp.ones(shape, bool), jnp.ones(shape, jnp.float32))

  return rule


def drop_small_advantage(
  rate: Share, scope: str = "group", literal: bool = False
) -> CompletionRule:
  """Drops with probability `rate` where |advantage| is below the mean.

  Args:
    rate: share of the eligible completions to drop, in [0, 1); or a function
      from the step to such a share.
    scope: the mean is of each "group", or of the "batch".
    literal: drops the `floor(rate * eligible)` smallest instead, ties at
      random, and reports the probabilities of the draw that it does not make:
      biased, as no weight brings back what is never kept.
  Source: DPPO, arXiv:2603.04135, section 4.2; `literal` is as much as is known
    of its algorithm 1.
  Deviates:
    1. The threshold's scope is our reading.
  """
  if not callable(rate):
    check_rate(rate, "completion")

  def choose(step, noise, advantages, is_drawn):
    drop = _at(rate, step)
    size = jnp.where(is_drawn, jnp.abs(advantages), 0.0)
    mean = size.sum() / jnp.maximum(is_drawn.sum(dtype=jnp.float32), 1.0)
    is_small = is_drawn & (size < mean * (1 - ROUNDING))
    prob = jnp.where(is_small, jnp.float32(1 - drop), 1.0)
    if not literal:
      return Selection(noise < prob, prob)
    place, _ = _places(noise, size, is_small)
    num_dropped = _floor(drop, is_small.sum(dtype=jnp.int32))
    return Selection(~is_small | (place >= num_dropped), prob)

  return _within(scope, choose)


def top_abs_advantage(keep: Share, scope: str = "group") -> CompletionRule:
  """Keeps the largest |advantage|, ties at random.

  The probabilities are those of the tie-break: 1 above the last place, 0
  below. What is never kept makes any weights biased; see `unweighted`.

  Args:
    keep: share of the completions, in (0, 1], rounded down but at least one;
      or a function from the step to such a share.
    scope: of each "group", or of the "batch".
  Source: CPPO, arXiv:2503.22342, equations 8 to 10; "batch" is the authors'
    code.
  """
  if not callable(keep):
    check_share(keep, "keep")

  def choose(step, noise, advantages, is_drawn):
    num_drawn = is_drawn.sum(dtype=jnp.int32)
    num = jnp.maximum(_floor(_at(keep, step), num_drawn), 1)
    place, ties = _places(noise, jnp.abs(advantages), is_drawn)
    return _chosen(is_drawn & (place >= num_drawn - num), ties, is_drawn)

  return _within(scope, choose)


def max_variance(keep: Share, scope: str = "group") -> CompletionRule:
  """Keeps the subset whose advantages have the largest variance.

  That is some number of the highest together with the lowest. Where several
  numbers do equally well, up to rounding, the most balanced is taken, and of
  two the one with more of the lowest; ties are broken at random, with
  probabilities as in `top_abs_advantage`. Within a group the rewards have the
  same subset.

  Args:
    keep: share of the completions, in (0, 1], rounded down but at least two;
      or a function from the step to such a share.
    scope: of each "group", or of the "batch".
  Source: PODS, arXiv:2504.13818; D3S, arXiv:2509.22115, for the batch.
  """
  if not callable(keep):
    check_share(keep, "keep")

  def choose(step, noise, advantages, is_drawn):
    num_drawn = is_drawn.sum(dtype=jnp.int32)
    num = jnp.maximum(_floor(_at(keep, step), num_drawn), 2)
    num = jnp.minimum(num, num_drawn)
    # Centred first: sums of squares would otherwise swallow the differences.
    total = jnp.where(is_drawn, advantages, 0.0).sum()
    mean = total / jnp.maximum(num_drawn, 1).astype(jnp.float32)
    x = jnp.where(is_drawn, advantages - mean, 0.0)
    place, ties = _places(noise, x, is_drawn)
    num_high = _num_highest(x, is_drawn, num)
    is_low = place < num - num_high
    is_high = place >= num_drawn - num_high
    return _chosen(is_drawn & (is_low | is_high), ties, is_drawn)

  return _within(scope, choose)


def _num_highest(
  x: Float[Array, "n"], is_drawn: Bool[Array, "n"], num: Int[Array, ""]
) -> Int[Array, ""]:
  """How many of the `num` of largest variance are from the top."""
  num_drawn = is_drawn.sum(dtype=jnp.int32)
  ascending = jnp.sort(jnp.where(is_drawn, x, jnp.inf))
  ascending = jnp.where(jnp.isinf(ascending), 0.0, ascending)
  high = jnp.arange(x.shape[0] + 1, dtype=jnp.int32)

  def total(values):
    sums = jnp.pad(jnp.cumsum(values), (1, 0))
    lowest = sums[jnp.maximum(num - high, 0)]
    return lowest + sums[num_drawn] - sums[jnp.maximum(num_drawn - high, 0)]

  variance = num.astype(jnp.float32) * total(ascending * ascending)
  variance -= jnp.square(total(ascending))  # times num squared
  variance = jnp.where(high <= num, variance, -jnp.inf)
  best = variance.max()
  is_best = variance >= best - ROUNDING * jnp.abs(best)
  imbalance = jnp.where(is_best, jnp.abs(2 * high - num), x.shape[0] + 1)
  return jnp.argmin(imbalance).astype(jnp.int32)


def neyman(
  budget: float,
  min_prob: float = 0.05,
  coherence: float = 0.0,
  proxy: str = "length",
) -> CompletionRule:
  """Keeps a fixed number, in proportion to what each adds to the gradient.

  Keeps exactly `round(budget * drawn)` completions, or every needed one with
  probability 1 where these are fewer. A completion that is not needed is not
  kept; where `is_needed` is None, these are those of zero advantage. The draw
  is systematic along (prompt, sign of the advantage, size), so that alike
  completions exclude one another; weights 1 / prob are unbiased.

  Args:
    budget: share of the completions drawn, in (0, 1]; at least one is kept.
    min_prob: least probability of a needed completion, in [0, 1]; their even
      share of the budget where that is lower.
    coherence: squared length of the mean of a completion's token gradients
      over the mean square of what is left of each, at least 0.
    proxy: what |advantage| times a token's scale is multiplied by. "length",
      `sqrt(coherence * L^2 + L)`: the norm of a sum of `L` such tokens;
      "surprise": the same with the sum of (1 - p)^2 for the second term;
      "none": L, so that |advantage| alone counts where a token's share is 1/L.
  Source: ours. Neyman 1934 for the probabilities, Madow 1949 for the draw.
  """
  check_share(budget, "budget")
  if not (0 <= min_prob <= 1 and 0 <= coherence < float("inf")):
    raise ValueError(
      f"min_prob is {min_prob} and must be in [0, 1], coherence is {coherence} "
      "and must be finite and at least 0; see config.method.args"
    )
  _check_word(proxy, ("length", "surprise", "none"), "proxy")

  def norm_of_sum(groups: Groups) -> Float[Array, "Q G"]:
    length = groups.lengths.astype(jnp.float32)
    if proxy == "none":
      return length
    is_surprise = proxy == "surprise" and groups.surprise is not None
    squares = groups.surprise if is_surprise else length
    return jnp.sqrt(jnp.float32(coherence) * length * length + squares)

  def rule(draw: Draw, groups: Groups) -> Selection:
    is_needed = groups.is_needed
    if is_needed is None:
      is_needed = groups.advantages != 0
    is_needed = is_needed & (groups.lengths > 0)
    size = jnp.abs(groups.advantages) * norm_of_sum(groups)
    if groups.scale is not None:
      size = size * groups.scale
    size = jnp.where(is_needed, size, 0.0)
    # Under a KL penalty zero advantages are needed too, at some probability.
    size = size / jnp.where(size.max() > 0, size.max(), 1.0)
    size = jnp.where(is_needed, jnp.maximum(size, LEAST_SIZE), 0.0)
    prompt = jnp.arange(size.shape[0], dtype=jnp.int32)[:, None]
    prompt = jnp.broadcast_to(prompt, size.shape)
    strata = (size, jnp.sign(groups.advantages), prompt)
    num = _round(budget, groups.lengths > 0)
    return _fixed_size(draw.key, size, num, min_prob, strata)

  return rule


def uniform(budget: float) -> CompletionRule:
  """Keeps exactly `round(budget * drawn)` completions, all equally likely.

  Args:
    budget: share of the completions drawn, in (0, 1]; at least one is kept.
  """
  check_share(budget, "budget")

  def rule(draw: Draw, groups: Groups) -> Selection:
    is_drawn = groups.lengths > 0
    num = _round(budget, is_drawn)
    return _fixed_size(draw.key, is_drawn.astype(jnp.float32), num)

  return rule


def _fixed_size(
  key: Key[Array, ""],
  size: Float[Array, "Q G"],
  num: Int[Array, ""],
  min_prob: float = 0.0,
  strata: tuple[Array, ...] = (),
) -> Selection:
  """A systematic draw in proportion to size, in the order of the strata.

  Args:
    strata: `[Q, G]` each, the most significant last; what they leave open is
      ordered at random.
  """
  order_key, key = jax.random.split(key)
  by = (jax.random.uniform(order_key, size.shape), *strata)
  order = jnp.lexsort([x.reshape(-1) for x in by])
  prob = designs.water_filling(size.reshape(-1), num, min_prob)
  num = jnp.minimum(num, (prob > 0).sum(dtype=jnp.int32))
  keep = designs.systematic(key, prob[order], num)
  keep = jnp.zeros(prob.shape, bool).at[order].set(keep)
  return Selection(keep.reshape(size.shape), prob.reshape(size.shape))


def unweighted(rule: CompletionRule, divisor: str = "kept") -> CompletionRule:
  """`rule` as if all were equally likely, which is biased where they are not.

  Args:
    divisor: "kept" reports for every completion the share of those drawn that
      was kept, so that the sum over the counts of the unpruned batch is the
      mean over what was kept; "drawn" reports 1, so that it is their sum.
  """
  _check_word(divisor, ("kept", "drawn"), "divisor")

  def biased(draw: Draw, groups: Groups) -> Selection:
    keep = rule(draw, groups).keep
    if divisor == "drawn":
      return Selection(keep, jnp.ones(keep.shape, jnp.float32))
    is_drawn = groups.lengths > 0
    count = lambda x: jnp.maximum(x.sum(dtype=jnp.float32), 1.0)
    share = count(keep & is_drawn) / count(is_drawn)
    return Selection(keep, jnp.full(keep.shape, share))

  return biased


def expected_share(rule: CompletionRule) -> CompletionRule:
  """`rule` with each group's mean taken over what was kept of it.

  The weight is C / prob, C being the expected share of the group kept, and the
  mean divides by the realised one: both are folded into the probability, which
  may exceed 1. A ratio estimator: its bias falls as 1 / (number kept), and a
  group of which nothing was kept counts as zero.

  Source: DPPO, arXiv:2603.04135, section 4.1.
  Deviates:
    1. What C is, the text at hand did not say. With the realised share for C
       the two cancel, and that is `rule` itself.
  """

  def ratio(draw: Draw, groups: Groups) -> Selection:
    chosen = rule(draw, groups)
    share = lambda x: x.astype(jnp.float32).mean(axis=1, keepdims=True)
    expected = share(chosen.prob)
    expected = jnp.where(expected > 0, expected, 1.0)
    return chosen.replace(prob=chosen.prob * share(chosen.keep) / expected)

  return ratio


def check_rate(rate: float, what: str) -> None:
  """Refuses a pruning rate that would make some weight infinite."""
  if not 0 <= rate < 1:
    raise ValueError(
      f"a {what} pruning rate of {rate} is outside [0, 1): at 1 nothing "
      "could stand for what is dropped; see config.method.args"
    )


def check_share(value: float, what: str) -> None:
  """Refuses what is not a share above 0."""
  if not 0 < value <= 1:
    raise ValueError(
      f"{what} is {value} but must be in (0, 1]; see config.method.args"
    )


def _check_word(value: str, allowed: tuple[str, ...], what: str) -> None:
  if value not in allowed:
    raise ValueError(
      f"{what} is {value!r} but must be one of {', '.join(allowed)}; see "
      "config.method.args"
    )


def _within(scope: str, choose: Callable[..., Selection]) -> CompletionRule:
  """`choose` in every group by itself, or in the batch as if it were one.

  Args:
    choose: `(step, noise [n], advantages [n], is_drawn [n]) -> Selection [n]`,
      where noise is uniform in [0, 1).
  """
  _check_word(scope, ("group", "batch"), "scope")

  def rule(draw: Draw, groups: Groups) -> Selection:
    shape = groups.advantages.shape
    rows = shape if scope == "group" else (1, groups.advantages.size)
    noise = jax.random.uniform(draw.key, shape)
    items = (noise, groups.advantages, groups.lengths > 0)
    items = [x.reshape(rows) for x in items]
    chosen = jax.vmap(choose, (None, 0, 0, 0))(draw.step, *items)
    return jax.tree.map(lambda x: x.reshape(shape), chosen)

  return rule


def _places(
  noise: Float[Array, "n"],
  x: Float[Array, "n"],
  is_candidate: Bool[Array, "n"],
) -> tuple[Int[Array, "n"], Int[Array, "n"]]:
  """Places of the candidates, 0 for the least, and numbers of their ties.

  Neighbours in size that differ by rounding are tied and ordered by noise.
  """
  x = jnp.where(is_candidate, x, 0.0)
  order = jnp.argsort(x)
  gaps = jnp.diff(x[order]) > ROUNDING * jnp.abs(x).max()
  ranks = jnp.pad(jnp.cumsum(gaps, dtype=jnp.int32), (1, 0))
  ties = jnp.zeros_like(ranks).at[order].set(ranks)
  order = jnp.lexsort((noise, ties, ~is_candidate))
  place = jnp.arange(x.shape[0], dtype=jnp.int32)
  return jnp.zeros_like(place).at[order].set(place), ties


def _chosen(
  keep: Bool[Array, "n"],
  ties: Int[Array, "n"],
  is_candidate: Bool[Array, "n"],
) -> Selection:
  """A choice that is at random among ties alone, and so how likely it was."""
  count = lambda x: (
    jnp.zeros(x.shape, jnp.float32).at[ties].add(x.astype(jnp.float32))
  )
  prob = count(keep) / jnp.maximum(count(is_candidate), 1.0)
  return Selection(keep, jnp.where(is_candidate, prob[ties], 0.0))


def _at(share: Share, step: Int[Array, ""]) -> float | Float[Array, ""]:
  return share(step) if callable(share) else share


def _floor(
  share: float | Float[Array, ""], count: Int[Array, ""]
) -> Int[Array, ""]:
  """`share * count` rounded down, save where only rounding made it less."""
  exact = jnp.float32(share) * count.astype(jnp.float32)
  return jnp.floor(exact * (1 + 1e-6)).astype(jnp.int32)


def _round(share: float, is_drawn: Bool[Array, "Q G"]) -> Int[Array, ""]:
  """The whole number next to that share of the completions, at least 1."""
  exact = jnp.float32(share) * is_drawn.sum(dtype=jnp.float32)
  return jnp.maximum(jnp.round(exact), 1.0).astype(jnp.int32)
