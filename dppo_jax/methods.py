"""The methods, each a value that says how it differs from a simpler one.

| method | prompts              | completions          | tokens      | weights |
|--------|----------------------|----------------------|-------------|---------|
| grpo   | every                | every                | every       | 1       |
| dppo   | history below mean   | small advantage      | every       | 1/prob  |
| cppo   | every                | top advantage        | every       | equal   |
| greso  | flat streaks, refill | every                | every       | equal   |
| pods   | every                | max variance         | every       | equal   |
| d1s    | every                | max variance         | every       | equal   |
| d2s    | every                | max variance (batch) | top entropy | equal   |
| d3s    | every                | the same, relaxing   | relaxing    | equal   |
| neyman | Beta posterior       | proportional to size | by size     | 1/prob  |

"Equal" weights are those of a mean over what was kept: such a method is biased
and says `unweighted`. Adding one is a factory and a line in `METHODS`.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp

from dppo_jax.algo import completion_rules, prompt_rules, token_rules
from dppo_jax.algo.refill import Refill


class Method(NamedTuple):
  """A way to spend rollouts and updates, as pure functions.

  Attributes:
    prompts: chooses prompts before the rollout, from history.
    completions: chooses completions after it, from their groups.
    tokens: chooses tokens of those, from their scores; None takes all.
    has_statistics_after: advantages are computed again from the completions
      chosen, which makes the gradient another one than the full batch's.
    refill: draws more prompts until enough groups are informative.
  """

  prompts: prompt_rules.PromptRule
  completions: completion_rules.CompletionRule
  tokens: token_rules.TokenRule | None = None
  has_statistics_after: bool = False
  refill: Refill | None = None


def grpo() -> Method:
  """Trains on every completion of every prompt.

  Source: Shao et al. 2024, arXiv:2402.03300.
  """
  return Method(
    prompts=prompt_rules.every_prompt(),
    completions=completion_rules.every_completion(),
  )


def dppo(
  prompt_rate: float = 0.5,
  completion_rate: float = 0.5,
  scope: str = "group",
  prompt_scope: str = "batch",
  score: str = "advantage",
  smoothing: float = 0.0,
  max_age: int = 0,
  prune_until: float = 1.0,
  has_expected_share: bool = False,
  is_literal: bool = False,
  steps: int = 0,
) -> Method:
  """GRPO on fewer prompts and completions, with the same expected gradient.

  Args:
    prompt_rate: share dropped of the prompts whose last visit taught little.
    completion_rate: share dropped of the completions whose |advantage| is
      below the mean.
    scope: that mean is of the "group" or of the "batch".
    prompt_scope: the usual score of prompts is the mean of the "batch" of
      candidates, or of "all" problems.
    score: a prompt's history: "advantage", the mean |advantage|, or
      "variance", that of its rewards.
    smoothing: weight of the older scores, in [0, 1).
    max_age: steps after which a score prunes no more; 0 is never.
    prune_until: share of the run after which nothing is pruned, in (0, 1].
    has_expected_share: divides by what was kept and multiplies by the expected
      share: a ratio estimator, biased by O(1 / kept).
    is_literal: drops a fixed share, lowest first, which is biased.
    steps: of the run. 0 takes config.steps; where there is no config, nothing
      changes over the run.
  Source: DPPO, arXiv:2603.04135; prune_until from InfoBatch, arXiv:2303.04947.
  Deviates:
    1. Draws at random with known probabilities, as the paper's proof needs;
       its algorithm 1 is said to floor a fixed share: `is_literal`.
    2. Divides by the counts of the unpruned batch, which is what the paper's
       factor C / (1 - P) amounts to where C is the share really kept;
       `has_expected_share` is the other reading.
    3. Pruned prompts wait for their next epoch and are not replaced.
    4. Rates, threshold and score are our reading: the text was not at hand.
  """
  prompts = prompt_rules.drop_by_history(
    _until(prompt_rate, prune_until, steps),
    score=score,
    smoothing=smoothing,
    max_age=max_age,
    scope=prompt_scope,
    literal=is_literal,
  )
  completions = completion_rules.drop_small_advantage(
    _until(completion_rate, prune_until, steps),
    scope=scope,
    literal=is_literal,
  )
  if has_expected_share:
    prompts = prompt_rules.expected_share(prompts)
    completions = completion_rules.expected_share(completions)
  return grpo()._replace(prompts=prompts, completions=completions)


def cppo(keep: float = 0.5, scope: str = "group") -> Method:
  """GRPO on the completions of the largest |advantage|.

  Args:
    keep: share of the completions kept, 1 - P in the paper.
    scope: the largest of each "group", or of the "batch".
  Source: CPPO, arXiv:2503.22342, equations 8 to 10.
  Deviates:
    1. The authors' code takes the largest of the batch: `scope`.
    2. Dynamic completion allocation is a larger `data.prompts_per_step`:
       1 / keep times as many prompts train on as many completions.
    3. One update on a rollout and no KL penalty, as the objective's defaults
       here are; the paper has 2 and 0.04.
    4. Ties are broken at random; two-valued rewards make them everywhere.
  """
  rule = completion_rules.top_abs_advantage(keep, scope)
  return grpo()._replace(completions=completion_rules.unweighted(rule))


def greso(
  base: float = 0.5,
  floor: float = 0.01,
  target: float = 0.25,
  tuning: float = 0.01,
  refill: str = "plain",
  max_draws: int = 4,
  is_weighted: bool = False,
  is_literal: bool = False,
) -> Method:
  """GRPO that skips prompts after visits on which all rewards were the same.

  `base=1, tuning=0` skips nothing: that is DAPO's dynamic sampling.
  `is_weighted=True, refill="none"` has the full batch's expected gradient.

  Args:
    base: keep probability after one such visit, its power after several.
    floor: the least keep probability.
    target: share of such groups towards which `base` tunes itself, a third of
      it for those that are all right and two for those all wrong.
    tuning: by how much, each step; 0 leaves it.
    refill: "plain" draws batches until one is full of informative groups and
      takes their mean; "exact" corrects for having stopped then; "none".
    max_draws: batches drawn in a step at most; the step then trains on what
      there is.
    is_weighted: weights 1 / probability; not with a "plain" refill.
    is_literal: thresholds on the mean reward, as in the authors' code, instead
      of exactly equal rewards.
  Source: GRESO, arXiv:2506.02177.
  Deviates:
    1. A streak counts visits; pruned prompts wait for their next epoch.
    2. A batch of candidates is as large as the batch trained on, and the last
       one is cut to the estimated need; what it leaves over is not visited.
  """
  _check("tuning", tuning, tuning >= 0, "at least 0")
  _check("max_draws", max_draws, max_draws >= 1, "at least 1")
  plain = is_weighted and refill == "plain"
  _check("refill", refill, not plain, "exact or none where is_weighted")
  prompts = prompt_rules.drop_flat_streaks(
    base, floor, target, tuning, literal=is_literal
  )
  kinds = ("plain", "exact", "none")
  _check("refill", refill, refill in kinds, "plain, exact or none")
  return grpo()._replace(
    prompts=prompts if is_weighted else prompt_rules.unweighted(prompts),
    refill=None if refill == "none" else Refill(max_draws, refill == "exact"),
  )


def pods(keep: float = 0.25) -> Method:
  """GRPO on each group's subset of largest reward variance, as if it were all.

  Args:
    keep: share of the completions kept, m / n in the paper.
  Source: PODS, arXiv:2504.13818.
  Deviates:
    1. At least two are kept; ties are broken at random, and of subsets of the
       same variance the most balanced is taken.
  """
  rule = completion_rules.max_variance(keep, "group")
  return grpo()._replace(
    completions=completion_rules.unweighted(rule), has_statistics_after=True
  )


def d1s(keep: float = 0.25, scope: str = "group") -> Method:
  """GRPO on the subset of largest advantage variance.

  Within a group that is the subset of PODS; the advantages stay those of the
  whole group.

  Args:
    keep: share of the completions kept.
    scope: the subset of each "group", or of the "batch" (D1S-Cross).
  Source: D3S, arXiv:2509.22115.
  Deviates:
    1. As `pods`.
  """
  rule = completion_rules.max_variance(keep, scope)
  return grpo()._replace(completions=completion_rules.unweighted(rule))


def d2s(
  keep: float = 0.25,
  keep_tokens: float = 0.2,
  scope: str = "batch",
  token_scope: str = "batch",
) -> Method:
  """D1S, and of what it keeps the tokens of large |advantage| x entropy.

  Args:
    keep_tokens: share of the tokens kept.
    token_scope: the largest of the "batch", or of each "completion".
  Source: D3S, arXiv:2509.22115.
  Deviates:
    1. The batch's subset is taken from all completions, not from the groups'.
    2. A completion's loss is the mean over its kept tokens. So it is under
       dapo, whose tokens otherwise count alike.
  """
  completion_rules.check_share(keep_tokens, "keep_tokens")
  return d1s(keep, scope)._replace(
    tokens=token_rules.top_entropy(keep_tokens, token_scope)
  )


def d3s(
  keep: float = 0.25,
  keep_tokens: float = 0.2,
  final_keep: float = 1.0,
  final_keep_tokens: float = 1.0,
  scope: str = "batch",
  token_scope: str = "batch",
  steps: int = 0,
) -> Method:
  """D2S that relaxes from its first shares to its last over the run.

  Args:
    final_keep, final_keep_tokens: shares at the end.
    steps: of the run. 0 takes config.steps; where there is no config, nothing
      changes over the run.
  Source: D3S, arXiv:2509.22115.
  Deviates:
    1. The shares are ours; the paper's were not found.
    2. As `d2s`.
  """
  _check("steps", steps, steps >= 0, "at least 0")
  for name, share in (
    ("keep", keep),
    ("keep_tokens", keep_tokens),
    ("final_keep", final_keep),
    ("final_keep_tokens", final_keep_tokens),
  ):
    completion_rules.check_share(share, name)
  return d2s()._replace(
    completions=completion_rules.unweighted(
      completion_rules.max_variance(_between(keep, final_keep, steps), scope)
    ),
    tokens=token_rules.top_entropy(
      _between(keep_tokens, final_keep_tokens, steps), token_scope
    ),
  )


def neyman(
  prompt_budget: float = 0.75,
  completion_budget: float = 0.25,
  token_budget: float = 1.0,
  min_prompt_prob: float = 0.1,
  min_prob: float = 0.05,
  proxy: str = "surprise",
  coherence: float = 0.0,
  kappa: float = 0.25,
  forgetting: float = 0.5,
  prior: float = 0.2,
  is_cost_aware: bool = True,
  token_size: str = "surprise",
) -> Method:
  """Exactly as many prompts, completions and tokens as asked, least variance.

  Probabilities are proportional to what each is expected to add to the
  gradient, the draw is systematic, and every weight is 1 / probability: the
  expected gradient is that of the full batch.

  Args:
    prompt_budget: share of the prompts rolled out, in (0, 1].
    completion_budget: share of their completions trained on, counted with
      those of zero advantage; all that are needed where these are fewer.
    token_budget: share of their tokens.
    min_prompt_prob, min_prob: least probabilities, which bound the weights.
    proxy: what stands for a completion's gradient beside |advantage|: the
      "surprise" of its tokens, their "length" alone, or "none".
    coherence: how far a completion's token gradients point one way.
    kappa: how much a group's split, beside its being mixed, is expected to
      add.
    forgetting: factor on what is remembered of a prompt, per epoch.
    prior: right, and wrong, completions believed before any was seen; below 1
      it expects most groups to be all right or all wrong.
    is_cost_aware: prefers prompts whose completions are short.
    token_size: a token's size: "surprise", "norm" or "entropy"; the last two
      take another pass over the model.
  Source: ours, after Neyman 1934 and Deville and Tille 1998.
  Deviates:
    1. A prompt's size is that of advantages divided by their deviation, under
       any objective.
  """
  completion_rules.check_share(prompt_budget, "prompt_budget")
  completion_rules.check_share(min_prompt_prob, "min_prompt_prob")
  completion_rules.check_share(completion_budget, "completion_budget")
  completion_rules.check_share(token_budget, "token_budget")
  return grpo()._replace(
    prompts=prompt_rules.neyman_prompts(
      prompt_budget,
      min_prompt_prob,
      kappa=kappa,
      forgetting=forgetting,
      prior=(prior, prior),
      cost_aware=is_cost_aware,
    ),
    completions=completion_rules.neyman(
      completion_budget, min_prob, coherence, proxy
    ),
    tokens=None
    if token_budget == 1
    else token_rules.neyman(token_budget, min_prob, token_size),
  )


METHODS = {
  "grpo": grpo,
  "dppo": dppo,
  "cppo": cppo,
  "greso": greso,
  "d3s": d3s,
  "d2s": d2s,
  "d1s": d1s,
  "pods": pods,
  "neyman": neyman,
}


def _check(name: str, value: object, is_fine: bool, limit: str) -> None:
  if not is_fine:
    raise ValueError(
      f"{name} is {value!r} but must be {limit}; see config.method.args"
    )


def _until(rate: float, share: float, steps: int) -> float | Callable:
  """`rate`, and 0 once `share` of the steps is behind."""
  completion_rules.check_share(share, "prune_until")
  _check("steps", steps, steps >= 0, "at least 0")
  if share == 1 or not steps:
    return rate
  completion_rules.check_rate(rate, "pruning")
  return lambda step: jnp.where(step < share * steps, jnp.float32(rate), 0.0)


def _between(first: float, last: float, steps: int) -> float | Callable:
  """From `first` to `last` in equal parts over the steps."""
  if first == last or not steps:
    return first

  def share(step):
    progress = step.astype(jnp.float32) / max(steps - 1, 1)
    return first + (last - first) * jnp.minimum(progress, 1.0)

  return share
