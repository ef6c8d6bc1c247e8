"""Our own design: of everything a number that pays, at the least variance."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from dppo_jax.algo import designs
from dppo_jax.methods.grpo import grpo
from dppo_jax.methods.method import (
  ROUNDING,
  CompletionRule,
  Method,
  PromptRule,
  TokenRule,
  check,
  check_choice,
  check_finite,
  check_share,
  require_stats,
  trainable,
  uniform_for_ids,
)
from dppo_jax.methods.neyman import budget as self_setting
from dppo_jax.methods.neyman import pass_rates
from dppo_jax.methods.neyman.budget import SelfSet
from dppo_jax.methods.ranking import fixed_size, round_count
from dppo_jax.records import Groups, Selection
from dppo_jax.rng import StepRng, as_step_rng

# Least size, relative to the largest, of a completion that is needed.
LEAST_SIZE = 1e-6
PROXIES = ("residual", "length", "none")
# (batch, stats) -> a token's size beside |advantage| x weight.
TOKEN_SIZES = {
  "residual": lambda batch, stats: -jnp.expm1(batch.old_logprobs),
  "logit_grad": lambda batch, stats: jnp.sqrt(
    jnp.maximum(stats.logit_grad_sq, 0.0)
  ),
  "entropy": lambda batch, stats: stats.entropy,
}
# What these were called before.
RENAMED = {"surprise": "residual", "norm": "logit_grad"}


def neyman(
  prompt_budget: float = 0.0,
  completion_budget: float = 0.0,
  token_budget: float = 1.0,
  min_prompt_prob: float = 0.1,
  min_prob: float = 0.05,
  proxy: str = "residual",
  coherence: float = 0.0,
  kappa: float = 0.25,
  forgetting: float = 0.5,
  prior: float = 0.2,
  is_cost_aware: bool = True,
  token_size: str = "residual",
  least_prompts: float = 0.25,
  least_completions: float = 0.03,
  update_cost: float = 0.0,
) -> Method:
  """As many prompts and completions as pay, at the least variance.

  Probabilities are proportional to what each is expected to add to the
  gradient, the draw is systematic, and every weight is 1 / probability: the
  expected gradient is that of the full batch. Budgets of 0 set themselves each
  step, by what steps have cost so far and how noisy gradients were.

  Args:
    prompt_budget: share of the prompts rolled out, in (0, 1]; 0 sets itself.
    completion_budget: share of their completions trained on, counted with
      those of zero advantage; all that are needed where these are fewer. 0
      sets itself.
    token_budget: share of their tokens.
    min_prompt_prob, min_prob: least probabilities, which bound the weights.
    proxy: what stands for a completion's gradient beside |advantage|: the
      "residual" 1 - p of its tokens, their number ("length"), or "none".
    coherence: how far a completion's token gradients point one way.
    kappa: how much a group's split, beside its being mixed, is expected to
      add.
    forgetting: factor on what is remembered of a prompt, per epoch.
    prior: right, and wrong, completions believed before any was seen; below 1
      it expects most groups to be all right or all wrong.
    is_cost_aware: prefers prompts whose completions are short.
    token_size: a token's size: "residual", "logit_grad" or "entropy"; the
      last two take another pass over the model.
    least_prompts, least_completions: the least that a share may set itself to:
      of the prompts, and of the completions that are needed.
    update_cost: seconds of an update on all that is needed over the other
      seconds of a step, by which shares set themselves. 0 takes this run's
      clock, and 1 until that has told; then no two runs are the same to the
      bit.
  Raises:
    ValueError: for a value outside these.
  Source: ours, after Neyman 1934 and Deville and Tille 1998; for the shares
    `methods.neyman.time_law.relative_seconds`.
  Deviates:
    1. A prompt's size is that of advantages divided by their deviation, under
       any objective.
  """
  for name, budget in (
    ("prompt_budget", prompt_budget),
    ("completion_budget", completion_budget),
  ):
    check(name, budget, lambda x: 0 <= x <= 1, "in (0, 1], or 0 to set itself")
  of_prompts = SelfSet(least_prompts, update_cost)
  of_prompts.check("prompts")
  of_completions = SelfSet(least_completions, update_cost)
  of_completions.check("completions")
  check_share("min_prompt_prob", min_prompt_prob)
  check_share("token_budget", token_budget)
  _check_size("token_size", token_size, tuple(TOKEN_SIZES))
  prompts = neyman_prompts(
    prompt_budget or of_prompts,
    min_prompt_prob,
    kappa=kappa,
    forgetting=forgetting,
    prior=(prior, prior),
    is_cost_aware=is_cost_aware,
  )
  completions = neyman_completions(
    completion_budget or of_completions, min_prob, coherence, proxy
  )
  tokens = neyman_tokens(token_budget, min_prob, token_size)
  return grpo()._replace(
    prompts=prompts,
    completions=completions,
    tokens=None if token_budget == 1 else tokens,
    reads_measured=not (prompt_budget and completion_budget),
  )


def neyman_prompts(
  budget: float | SelfSet,
  min_prob: float = 0.1,
  kappa: float = 0.25,
  forgetting: float = 0.5,
  prior: tuple[float, float] = (0.2, 0.2),
  is_cost_aware: bool = True,
) -> PromptRule:
  """Keeps a fixed number, the likelier the more a rollout should teach.

  A Beta distribution tells what is believed of each problem's pass rate. From
  it follows the second moment of the gradient that its group would give;
  probabilities are proportional to the root of that per token it would cost,
  which minimises the variance of the weighted sum. The draw is systematic
  along the believed pass rate. With nothing observed it is uniform.

  Args:
    budget: share of the candidates to keep, in (0, 1]: `round(budget * N)`
      and at least one are kept; or one that sets itself.
    min_prob: in (0, 1], least probability; the budget's where that is lower.
    kappa: `G |d|^2 / (4 s^2)`, where `d` is the difference of the mean scores
      (gradients of log-probability) of right and wrong completions and `s`
      the size of the noise of one: 0 where noise is all there is.
    forgetting: factor on what was counted, per epoch, in (0, 1].
    prior: right and wrong completions believed before any was observed.
    is_cost_aware: expects of a problem the tokens that it took before, or
      those of the others; otherwise all are taken to cost the same.
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
  if not isinstance(budget, SelfSet):
    check_share("budget", budget)
  check_share("min_prob", min_prob)
  check_finite("kappa", kappa)
  check_share("forgetting", forgetting)
  is_valid = lambda x: len(x) == 2 and 0 < min(x) <= max(x) < float("inf")
  check("prior", prior, is_valid, "two finite numbers above 0")

  def select(rng, history, ids):
    counts = pass_rates.decayed(history, rng.step, ids, forgetting)
    right, wrong = counts.right + prior[0], counts.wrong + prior[1]
    moment = pass_rates.second_moment(right, wrong, counts.group_size, kappa)
    moment = jnp.maximum(moment, ROUNDING)
    tokens = pass_rates.expected_tokens(history, ids)
    size = jnp.sqrt(moment / tokens if is_cost_aware else moment)
    # Ties are ordered at random, so that nothing depends on the caller's order.
    order_key, draw_key = jax.random.split(rng.key)
    tie_break = uniform_for_ids(order_key, ids)
    order = jnp.lexsort((tie_break, right / (right + wrong)))
    told = None
    if isinstance(budget, SelfSet):
      tokens *= counts.group_size.astype(jnp.float32)
      number, told = self_setting.of_prompts(
        budget, rng.measured, size, moment, tokens
      )
    else:
      number = max(round(budget * len(ids)), 1)
    prob = designs.water_filling(size[order], number, min_prob)
    keep = designs.systematic(draw_key, prob, number)
    back = jnp.argsort(order)
    return Selection(keep[back], prob[back], told)

  def observe(history, step, ids, rewards, correct, lengths):
    del rewards
    return pass_rates.update(history, step, ids, correct, lengths, forgetting)

  return PromptRule(pass_rates.init, select, observe)


def neyman_completions(
  budget: float | SelfSet,
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

  >>> import jax
  >>> import jax.numpy as jnp
  >>> from dppo_jax import algo, methods, records
  >>> rewards = jnp.array([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]])
  >>> advantages = algo.group_normalized(rewards)
  >>> groups = records.Groups(rewards, advantages, jnp.full((2, 4), 9))
  >>> chosen = methods.neyman_completions(0.25)(jax.random.key(0), groups)
  >>> print(chosen.keep.sum(), (100 * chosen.prob).astype(int))
  2 [[100  33  33  33]
   [  0   0   0   0]]

  Args:
    budget: share of the completions drawn, in (0, 1]; at least one is kept.
      Or a share of those needed, which sets itself.
    min_prob: least probability of a needed completion, in [0, 1]; their even
      share of the budget where that is lower.
    coherence: squared length of the mean of a completion's token gradients
      over the mean square of what is left of each, at least 0.
    proxy: what |advantage| times a token's scale is multiplied by. "length",
      `sqrt(coherence * L^2 + L)`: the norm of a sum of `L` such tokens;
      "residual": the same with the sum of (1 - p)^2 for the second term;
      "none": L, so that |advantage| alone counts where a token's share is 1/L.
  Raises:
    ValueError: for a value outside these.
  Source: ours. Neyman 1934 for the probabilities, Madow 1949 for the draw.
  """
  if not isinstance(budget, SelfSet):
    check_share("budget", budget)
  check("min_prob", min_prob, lambda x: 0 <= x <= 1, "in [0, 1]")
  check_finite("coherence", coherence)
  _check_size("proxy", proxy, PROXIES)

  def norm_of_sum(groups: Groups) -> Float[Array, "Q G"]:
    length = groups.lengths.astype(jnp.float32)
    if proxy == "none":
      return length
    has_residual = proxy == "residual" and groups.sum_sq_residual is not None
    squares = groups.sum_sq_residual if has_residual else length
    return jnp.sqrt(jnp.float32(coherence) * length * length + squares)

  def rule(rng: StepRng | jax.Array, groups: Groups) -> Selection:
    rng = as_step_rng(rng)
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
    told = None
    if isinstance(budget, SelfSet):
      num, told = self_setting.of_completions(
        budget, rng.measured, groups, size
      )
    else:
      num = round_count(budget, (groups.lengths > 0).sum(dtype=jnp.int32))
    chosen = fixed_size(rng.key, size, num, min_prob, strata)
    return chosen.replace(told=told)

  return rule


def neyman_tokens(
  budget: float, min_prob: float = 0.05, size: str = "residual"
) -> TokenRule:
  """Keeps a fixed number of tokens, in proportion to what they may add.

  A token's size is |advantage| x weight x one of `logit_grad`, the length of
  the gradient of its log-probability with respect to the logits; `residual`, a
  lower bound of it that is known from the rollout, 1 - p; `entropy`. The draw
  is systematic along the rows, so that neighbours exclude each other.

  Args:
    budget: share of the trainable tokens to keep, in (0, 1]; rounded to a
      number of tokens, at least one.
    min_prob: in [0, 1], least probability of a trainable token, which bounds
      its weight; `budget` where that is lower.
    size: a key of `TOKEN_SIZES`.
  Raises:
    ValueError: for a value outside these.
  Source: Neyman 1934, optimal allocation; D3S, arXiv:2509.22115, for
    choosing tokens after completions.
  """
  check_share("budget", budget)
  check("min_prob", min_prob, lambda x: 0 <= x <= 1, "in [0, 1]")
  _check_size("size", size, tuple(TOKEN_SIZES))

  needs_stats = size != "residual"

  def select(rng, batch, stats):
    rng = as_step_rng(rng)
    if needs_stats:
      require_stats(stats)
    can_train = trainable(batch)
    measure = jnp.maximum(TOKEN_SIZES[size](batch, stats), 0.0)
    measure *= jnp.abs(batch.advantages * batch.weights)
    measure = jnp.where(can_train, measure, 0.0)
    # A size of 0 need not be a gradient of 0: there may be a KL penalty, or a
    # policy that has moved on. Without any chance the token would be a bias.
    largest = measure.max()
    least = jnp.where(largest > 0, largest / designs.GRID, 1.0)
    measure = jnp.where(can_train, jnp.maximum(measure, least), 0.0)
    n = round_count(budget, can_train.sum(dtype=jnp.int32))
    prob = designs.water_filling(measure.reshape(-1), n, min_prob)
    keep = designs.systematic(rng.key, prob, n)
    return Selection(
      keep.reshape(can_train.shape), prob.reshape(can_train.shape)
    )

  return TokenRule(needs_stats, select)


def _check_size(name: str, value: str, choices: tuple[str, ...]) -> None:
  """As `check_choice`; a name of before is told the one of today."""
  today = RENAMED.get(value) if isinstance(value, str) else None
  limit = f"{today!r}, as that is called now"
  check(name, value, lambda _: today not in choices, limit)
  check_choice(name, value, choices)
