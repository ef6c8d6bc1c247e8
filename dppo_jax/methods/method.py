"""The parts of a method, as pure functions, and the simplest choice of each.

A completion rule is `rule(rng, groups, budget) -> Selection [Q, G]`. It sees
full groups, before anything is dropped, and reports the probability of the draw
it makes; a rule that cannot is wrapped in `unweighted`. Completions of length 0
are of prompts that were not rolled out, or are masked since they were cut off:
they are not counted, and keeping them has no effect. `rng` is a `StepRng`, or a
bare key if none of the rule's rates is a schedule. `budget` is the fraction
that the method's policy has chosen, 1 if it has none; most rules ignore it.

A prompt rule sees only what was observed before this step. Its choice is
therefore independent of the rollouts, and weights 1 / prob are unbiased too.
"""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree
import numpy as np

from dppo_jax.algo import designs
from dppo_jax.algo.policy_loss import PerCompletion
from dppo_jax.methods.dynamic_sampling import DynamicSampling
from dppo_jax.records import (
  Groups,
  IntScalar,
  PackedBatch,
  Scalar,
  Selection,
  TokenStats,
)
from dppo_jax.rng import StepRng, keys_for_ids

# (rng, groups, budget). In this package's rules, the budget is optional and
# `rng` may be a key.
CompletionRule = Callable[..., Selection]
History: TypeAlias = PyTree[jax.Array]
Ids = Int[Array, "N"]
Schedule = Callable[[IntScalar], Scalar]  # of the step
Rate = float | Schedule  # constant or scheduled
# (metrics, added_variance, micro_batches) -> (fraction, scalars to log): the
# budget of the next step; see `neyman.budget.BudgetPolicy`.
Policy = Callable[..., tuple[float, dict[str, float]]]

# Numbers that are equal in theory differ in the last bits of a float32.
ROUNDING = 1e-5


class PromptRule(NamedTuple):
  """A choice of prompts before the rollout.

  Attributes:
    init: `num_prompts -> history`, the memory of `M` problems.
    select: `(rng, history, ids [N]) -> Selection [N]`; `rng.step` counts the
      same steps as `observe`.
    observe: `(history, step, ids [Q], rewards [Q, G], correct [Q, G],
      lengths [Q, G]) -> history`. Rewards may be shaped; `correct`, in [0, 1],
      is the verifier's. An id of `M` or more is a prompt that was not rolled
      out and changes nothing.
  """

  init: Callable[[int], History]
  select: Callable[[StepRng, History, Ids], Selection]
  observe: Callable[
    [History, IntScalar, Ids, PerCompletion, PerCompletion, Int[Array, "Q G"]],
    History,
  ]


class TokenRule(NamedTuple):
  """A choice among the tokens of the kept completions.

  The model still reads a token that is not chosen, as context; its part of the
  logits and of their gradient is saved.

  Attributes:
    needs_stats: True if `select` reads `TokenStats`, which cost a forward
      pass; otherwise `stats` may be None.
    select: `(rng, batch, stats) -> Selection [*rows, L]`, from a `StepRng` and
      a `PackedBatch`; positions that cannot be trained have probability 0.
  """

  needs_stats: bool
  select: Callable[[StepRng, PackedBatch, TokenStats | None], Selection]


class Budget(NamedTuple):
  """Fraction of the completions that a method trains on, chosen by the host.

  Attributes:
    policy: makes the policy of a run.
    added_variance: `(groups, fractions [K]) -> [K]`, variance that the rule
      adds to the gradient at each, over the sum of the completions' squared
      gradient norms.
    fractions: `[K]`, to choose from, rising to 1.
  """

  policy: Callable[[], Policy]
  added_variance: Callable[[Groups, Float[Array, "K"]], Float[Array, "K"]]
  fractions: np.ndarray


class Method(NamedTuple):
  """A way to spend rollouts and updates.

  Attributes:
    tokens: chooses tokens of the kept completions; None takes all.
    has_statistics_after: recomputes advantages from the completions chosen,
      which biases the gradient.
    trains_zero_advantage: packs completions of zero advantage too. The
      gradient is the same; the update costs as much as if none were dropped.
    dynamic_sampling: draws more prompts until enough groups have rewards that
      differ; None draws once.
    has_schedule: the amount pruned depends on the number of steps of the run,
      which a resumed run may then not change.
    budget: chooses the third argument of the completion rule between steps,
      by the gradient noise, which is then measured; None passes 1.
    prune_less: advice for warnings, `raise ARGUMENT or ARGUMENT`, that makes
      the rules keep more and weights smaller; empty if it is unknown.
  """

  prompts: PromptRule
  completions: CompletionRule
  tokens: TokenRule | None = None
  has_statistics_after: bool = False
  trains_zero_advantage: bool = False
  dynamic_sampling: DynamicSampling | None = None
  has_schedule: bool = False
  budget: Budget | None = None
  prune_less: str = ""


def every_prompt() -> PromptRule:
  """Returns a rule that keeps every prompt and remembers nothing."""
  return PromptRule(
    init=lambda num_prompts: (),
    select=lambda rng, history, ids: Selection.every(ids.shape),
    observe=lambda history, step, ids, rewards, correct, lengths: history,
  )


def every_completion() -> CompletionRule:
  """Returns a rule that keeps every completion."""
  return lambda rng, groups, budget=1.0: Selection.every(
    groups.advantages.shape
  )


def unweighted_prompts(rule: PromptRule) -> PromptRule:
  """Returns `rule` with every probability 1, which biases it."""

  def select(rng, history, ids):
    chosen = rule.select(rng, history, ids)
    return chosen.replace(prob=jnp.ones_like(chosen.prob))

  return rule._replace(select=select)


def unweighted(rule: CompletionRule) -> CompletionRule:
  """Returns `rule` with equal probabilities, which biases it.

  Every probability is the fraction of the drawn completions that was kept, so
  that the weighted sum over the unpruned batch's denominator is the mean over
  the kept completions.
  """

  def biased(
    rng: StepRng | jax.Array, groups: Groups, budget: Scalar | float = 1.0
  ) -> Selection:
    keep = rule(rng, groups, budget).keep
    is_drawn = groups.lengths > 0
    count = lambda x: jnp.maximum(x.sum(dtype=jnp.float32), 1.0)
    fraction = count(keep & is_drawn) / count(is_drawn)
    return Selection(keep, jnp.full(keep.shape, fraction))

  return biased


def at_step(rate: Rate, step: int | IntScalar | None):
  """Evaluates a constant or scheduled rate at `step`.

  Raises:
    ValueError: if a scheduled rate has no step.
  """
  if not callable(rate):
    return rate
  if step is None:
    raise ValueError("a scheduled rate needs a StepRng: see rng.rng_at")
  return rate(jnp.asarray(step, jnp.int32))


def trainable(batch: PackedBatch) -> Bool[Array, "*rows L"]:
  """Returns True for the tokens that a token rule may choose."""
  return batch.is_trained & (batch.weights != 0)


def uniform_for_ids(key: jax.Array, ids: Int[Array, "N"]) -> Float[Array, "N"]:
  """Returns a number in [0, 1) per prompt, independent of other prompts."""
  return jax.vmap(jax.random.uniform)(keys_for_ids(key, ids))


def draw_prompts(
  key: jax.Array, ids: Int[Array, "N"], prob: Float[Array, "N"]
) -> Selection:
  """Keeps each prompt independently, with about the given probability."""
  prob = designs.drawn_probability(prob)
  return Selection(uniform_for_ids(key, ids) < prob, prob)
