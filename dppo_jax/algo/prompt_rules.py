"""Which prompts to roll out: `PromptRule` values, and what they remember.

A rule sees only what was observed before this step, so its choice is
independent of the rollouts to come and the weight 1 / prob leaves the expected
gradient that of the full batch.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from dppo_jax import keys
from dppo_jax.algo import advantages, designs, pass_rates
from dppo_jax.algo.completion_rules import ROUNDING, check_rate
from dppo_jax.records import Selection

History = PyTree[jax.Array]
Schedule = Callable[[Int[Array, ""]], Float[Array, ""]]


class PromptRule(NamedTuple):
  """A way to choose prompts, as pure functions.

  Attributes:
    init: `num_prompts -> history`, the memory of `M` problems.
    select: `(draw, history, ids [N]) -> Selection [N]`; `draw.step` counts
      the steps that `observe` is told.
    observe: `(history, step, ids [Q], rewards [Q, G], lengths [Q, G] = None)
      -> history`; an id of `M` or more is a prompt that was not rolled out and
      changes nothing. Lengths are tokens of each completion.
  """

  init: Callable[..., History]
  select: Callable[..., Selection]
  observe: Callable[..., History]


def every_prompt() -> PromptRule:
  """Keeps all, with probability 1, and remembers nothing."""

  def select(draw, history, ids):
    return Selection(jnp.ones(ids.shape, bool), jnp.ones(ids.shape))

  return PromptRule(
    init=lambda num_prompts: (),
    select=select,
    observe=lambda history, step, ids, rewards, lengths=None: history,
  )


class Scores(NamedTuple):
  """What each problem taught: `[M]` scores, inf where never visited."""

  score: Float[Array, "M"]
  last_step: Int[Array, "M"]


def drop_by_history(
  rate: float | Schedule,
  advantage: Callable[
    [Float[Array, "Q G"]], Float[Array, "Q G"]
  ] = advantages.group_normalized,
  score: str = "advantage",
  max_age: int = 0,
  smoothing: float = 0.0,
  scope: str = "batch",
  literal: bool = False,
) -> PromptRule:
  """Drops with probability `rate` where the last visit taught less than usual.

  A prompt is eligible where its score is below the mean score of those that
  were ever visited. A prompt never visited is always kept.

  Args:
    rate: share of the eligible prompts to drop, in [0, 1), or a function of
      the step that returns it.
    advantage: rewards to advantages, as the method computes them.
    score: of a visit, "advantage" for the group's mean |advantage| or
      "variance" for the variance of its rewards.
    max_age: steps after which a score counts as never observed; 0 for never.
    smoothing: in [0, 1), the old score's share in the new one.
    scope: whose mean is usual, that of the "batch" of candidates or of "all"
      problems.
    literal: drops exactly the `floor(rate * eligible)` lowest scores, ties at
      random. This is biased: the probability reported, 1 - rate, is not that
      with which an eligible prompt is kept.
  Raises:
    ValueError: for a value outside these.
  Source: DPPO, arXiv:2603.04135, section 4.2 and for `literal` algorithm 1;
    InfoBatch, arXiv:2303.04947, for the soft threshold at the mean.
  Deviates:
    1. The score, its mean as threshold and the constant rate are a reading;
       ageing, smoothing and the choice of scope are ours.
  """
  if not callable(rate):
    check_rate(rate, "prompt")
  scores, scopes = ("advantage", "variance"), ("batch", "all")
  _check("score", score, score in scores, "advantage or variance")
  _check("scope", scope, scope in scopes, "batch or all")
  _check("smoothing", smoothing, 0 <= smoothing < 1, "in [0, 1)")
  _check("max_age", max_age, max_age >= 0, "at least 0")

  def init(num_prompts: int) -> Scores:
    return Scores(
      jnp.full((num_prompts,), jnp.inf, jnp.float32),
      jnp.zeros((num_prompts,), jnp.int32),
    )

  def select(draw, history, ids):
    is_known = jnp.isfinite(history.score)
    if max_age:
      is_known &= draw.step - history.last_step <= max_age
    pool = slice(None) if scope == "all" else ids
    total = jnp.where(is_known, history.score, 0.0)[pool].sum()
    count = is_known[pool].sum(dtype=jnp.float32)
    mean = total / jnp.maximum(count, 1.0)
    seen = history.score[ids]
    is_eligible = is_known[ids] & (seen < mean * (1 - ROUNDING))
    share = rate(draw.step) if callable(rate) else rate
    share = jnp.asarray(share, jnp.float32)
    prob = jnp.where(is_eligible, 1 - share, 1.0)
    luck = _luck(draw.key, ids)
    if not literal:
      return Selection(luck < prob, prob)
    number = jnp.floor(share * is_eligible.sum(dtype=jnp.float32) + ROUNDING)
    worst = jnp.lexsort((luck, jnp.where(is_eligible, seen, jnp.inf)))
    return Selection(jnp.argsort(worst).astype(jnp.float32) >= number, prob)

  def observe(history, step, ids, rewards, lengths=None):
    if score == "advantage":
      seen = jnp.abs(advantage(rewards)).mean(axis=1)
    else:
      seen = rewards.var(axis=1)
    old = history.score[ids]
    mixed = smoothing * old + (1 - smoothing) * seen
    seen = jnp.where(jnp.isfinite(old), mixed, seen)
    return Scores(
      history.score.at[ids].set(seen, mode="drop"),
      history.last_step.at[ids].set(step, mode="drop"),
    )

  return PromptRule(init, select, observe)


class Streaks(NamedTuple):
  """Runs of flat groups, and how far they are trusted.

  Attributes:
    run: `[M]`, flat groups since the last other one; -1 where never visited.
    is_easy: `[M]`, whether the last flat group was all right.
    trust: `[2]`, probability of keeping after a run of one, easy and hard.
    flat: `[2]`, easy and hard groups at `step` of problems visited before.
    num: groups at `step` of problems visited before.
    step: the last that was observed.
  """

  run: Int[Array, "M"]
  is_easy: Bool[Array, "M"]
  trust: Float[Array, "2"]
  flat: Int[Array, "2"]
  num: Int[Array, ""]
  step: Int[Array, ""]


def drop_flat_streaks(
  base: float = 0.5,
  floor: float = 0.01,
  target: float = 0.25,
  step: float = 0.01,
  easy_share: float = 1 / 3,
  right: float = 0.5,
  literal: bool = False,
) -> PromptRule:
  """Keeps the less often, the longer a problem's groups have been flat.

  Flat is a group whose rewards are all the same. After `z` flat groups in a
  row a prompt is kept with probability `max(p**z, floor)`, where `p` is that
  of easy or of hard problems, as its last group was. Each `p` starts at `base`
  and after a step loses `step` where too many groups were flat in its way,
  else gains it, within 0.05 and 0.95. With `step` 0 it stays at `base`.

  The probabilities are those of the draw. Several observations of one step
  count together, and none changes what this step's other prompts meet.

  Args:
    base: in (0, 1].
    floor: in (0, 1].
    target: share of flat groups that is not too many.
    step: change of `p`, at least 0.
    easy_share: share of the target that is for easy groups, in [0, 1].
    right: reward above which a flat group is easy.
    literal: as the authors' code tells groups apart, by their mean rewards:
      easy from 0.98, hard up to 0.11, where credit for format alone is 0.1.
  Raises:
    ValueError: for a value outside these.
  Source: GRESO, arXiv:2506.02177, and its public code at b277843.
  Deviates:
    1. The method does not weight by these probabilities: wrap in `unweighted`.
    2. `p` moves by the groups of problems that were visited before, and not
       where there are none; the code waits for the end of the first epoch.
    3. The code's share of hard groups counts only rewards of exactly 0.1.
  """
  _check("base", base, 0 < base <= 1, "in (0, 1]")
  _check("floor", floor, 0 < floor <= 1, "in (0, 1]")
  _check("target", target, 0 <= target <= 1, "in [0, 1]")
  _check("step", step, step >= 0, "at least 0")
  _check("easy_share", easy_share, 0 <= easy_share <= 1, "in [0, 1]")

  def init(num_prompts: int) -> Streaks:
    return Streaks(
      run=jnp.full((num_prompts,), -1, jnp.int32),
      is_easy=jnp.zeros((num_prompts,), bool),
      trust=jnp.full((2,), base, jnp.float32),
      flat=jnp.zeros((2,), jnp.int32),
      num=jnp.int32(0),
      step=jnp.int32(0),
    )

  def trust_at(history, now):
    """What is trusted at step `now`, once the last step is over."""
    if not step:
      return history.trust
    count = jnp.maximum(history.num, 1).astype(jnp.float32)
    targets = jnp.array([easy_share, 1 - easy_share], jnp.float32) * target
    is_many = history.flat.astype(jnp.float32) / count >= targets - ROUNDING
    moved = history.trust + jnp.where(is_many, -step, step)
    is_due = (history.num > 0) & (now > history.step)
    return jnp.where(is_due, jnp.clip(moved, 0.05, 0.95), history.trust)

  def select(draw, history, ids):
    easy, hard = trust_at(history, draw.step)
    trust = jnp.where(history.is_easy[ids], easy, hard)
    run = history.run[ids].astype(jnp.float32)
    prob = jnp.where(run > 0, jnp.maximum(trust**run, floor), 1.0)
    return Selection(_luck(draw.key, ids) < prob, prob)

  def observe(history, now, ids, rewards, lengths=None):
    if literal:
      mean = rewards.mean(axis=1)
      is_easy, is_hard = mean >= 0.98, mean <= 0.11
    else:
      is_flat = advantages.is_constant(rewards)
      is_easy = is_flat & (rewards.max(axis=1) > right)
      is_hard = is_flat & ~is_easy
    run = history.run[ids]
    is_again = (ids < history.run.shape[0]) & (run >= 0)
    longer = jnp.where(is_easy | is_hard, jnp.maximum(run, 0) + 1, 0)
    kinds = jnp.stack([is_easy, is_hard]) & is_again
    is_same_step = now == history.step
    since = lambda count: jnp.where(is_same_step, count, 0)
    return Streaks(
      run=history.run.at[ids].set(longer, mode="drop"),
      is_easy=history.is_easy.at[ids].set(is_easy, mode="drop"),
      trust=trust_at(history, now),
      flat=since(history.flat) + kinds.sum(axis=1, dtype=jnp.int32),
      num=since(history.num) + is_again.sum(dtype=jnp.int32),
      step=jnp.asarray(now, jnp.int32),
    )

  return PromptRule(init, select, observe)


def neyman_prompts(
  budget: float,
  min_prob: float = 0.1,
  kappa: float = 0.25,
  forgetting: float = 0.5,
  prior: tuple[float, float] = (0.2, 0.2),
  cost_aware: bool = True,
) -> PromptRule:
  """Keeps a fixed number, the likelier the more a rollout should teach.

  A Beta distribution tells what is believed of each problem's pass rate. From
  it follows the second moment of the gradient that its group would give;
  probabilities are proportional to the root of that per token it would cost,
  which minimises the variance of the weighted sum. The draw is systematic
  along the believed pass rate. With nothing observed it is uniform.

  Args:
    budget: share of the candidates to keep, in (0, 1]: `round(budget * N)`
      and at least one are kept.
    min_prob: in (0, 1], least probability; the budget's where that is lower.
    kappa: `G |d|^2 / (4 s^2)`, where `d` is the difference of the mean scores
      (gradients of log-probability) of right and wrong completions and `s`
      the size of the noise of one: 0 where noise is all there is.
    forgetting: factor on what was counted, per epoch, in (0, 1].
    prior: right and wrong completions believed before any was observed.
    cost_aware: expects of a problem the tokens that it took before, or those
      of the others; otherwise all are taken to cost the same.
  Raises:
    ValueError: for a value outside these.
  Source: Neyman 1934, optimal allocation; the rest is ours.
  Deviates:
    1. The default of `kappa` is a guess, neither fitted nor published. Those
       of `prior` and `forgetting` believe of a group of 16 that were all
       wrong, or all right, an epoch ago that it is so again with a
       probability of 0.8: GRESO, arXiv:2506.02177, reports 0.79.
    2. Probabilities are rounded to `designs.GRID`; where prompts tie, a random
       order says which of them is rounded up.
  """
  _check("budget", budget, 0 < budget <= 1, "in (0, 1]")
  _check("min_prob", min_prob, 0 < min_prob <= 1, "in (0, 1]")
  _check("kappa", kappa, kappa >= 0, "at least 0")
  _check("forgetting", forgetting, 0 < forgetting <= 1, "in (0, 1]")
  _check("prior", prior, min(prior) > 0, "above 0")

  def select(draw, history, ids):
    known = pass_rates.of(history, draw.step, ids, forgetting)
    right, wrong = known.right + prior[0], known.wrong + prior[1]
    moment = pass_rates.second_moment(right, wrong, known.group_size, kappa)
    moment = jnp.maximum(moment, ROUNDING)
    if cost_aware:
      moment = moment / pass_rates.expected_tokens(history, ids)
    # In an order that is not the caller's: nothing depends on that one.
    order_key, draw_key = jax.random.split(draw.key)
    order = jnp.lexsort((_luck(order_key, ids), right / (right + wrong)))
    number = max(round(budget * len(ids)), 1)
    prob = designs.water_filling(jnp.sqrt(moment)[order], number, min_prob)
    keep = designs.systematic(draw_key, prob, number)
    back = jnp.argsort(order)
    return Selection(keep[back], prob[back])

  def observe(history, step, ids, rewards, lengths=None):
    return pass_rates.count(history, step, ids, rewards, lengths, forgetting)

  return PromptRule(pass_rates.none, select, observe)


def expected_share(rule: PromptRule) -> PromptRule:
  """`rule` as a ratio estimator: weights of C / (1 - P), mean over the kept.

  `C` is the expected share kept, the mean probability, while the mean divides
  by the number really kept. That is a probability of `prob * kept share / C`,
  which may exceed 1. The bias is of order 1 / N.

  Source: DPPO, arXiv:2603.04135, section 4.1, in the reading in which C is an
    expectation; with the share really kept it is `rule` itself.
  """

  def select(draw, history, ids):
    chosen = rule.select(draw, history, ids)
    number = jnp.maximum(chosen.keep.sum(dtype=jnp.float32), 1.0)
    return chosen.replace(prob=chosen.prob * number / chosen.prob.sum())

  return rule._replace(select=select)


def unweighted(rule: PromptRule) -> PromptRule:
  """`rule` without its correction: probabilities of 1, hence a biased mean."""

  def select(draw, history, ids):
    chosen = rule.select(draw, history, ids)
    return chosen.replace(prob=jnp.ones_like(chosen.prob))

  return rule._replace(select=select)


def _luck(key: jax.Array, ids: Int[Array, "N"]) -> Float[Array, "N"]:
  """A uniform number in [0, 1) for each prompt, whatever its company."""
  return jax.vmap(jax.random.uniform)(keys.for_items(key, ids))


def _check(name: str, value: object, is_fine: bool, limit: str) -> None:
  if not is_fine:
    raise ValueError(
      f"{name} is {value!r} but must be {limit}; see config.method.args"
    )
