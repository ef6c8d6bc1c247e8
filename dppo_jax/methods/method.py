"""What a method is: a few pure functions, and the simplest choices of each.

A completion rule is `rule(rng, groups) -> Selection [Q, G]`. It looks at whole
groups, before anything is dropped. The probability it reports is that of the
draw it makes, so that the weight 1 / prob is unbiased; a rule for which that
is not so says it. Completions of length 0 belong to prompts that were not
rolled out: they are not counted, and whether they are kept means nothing. `rng`
is a `StepRng`; the rules of this package take a key alone as well, where no
share of theirs depends on the step.

A prompt rule sees only what was observed before this step. Its choice is
therefore independent of the rollouts to come, and the weight 1 / prob leaves
the expected gradient that of the full batch.
"""

from collections.abc import Callable
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from dppo_jax.algo import validation
from dppo_jax.methods.dynamic_sampling import DynamicSampling
from dppo_jax.records import Groups, PackedBatch, Selection, TokenStats
from dppo_jax.rng import StepRng, keys_for_ids

CompletionRule = Callable[[StepRng | jax.Array, Groups], Selection]
History = PyTree[jax.Array]
Schedule = Callable[[Int[Array, ""]], Float[Array, ""]]  # of the step
Share = float | Schedule  # a constant, or what changes over the run

# Numbers that are equal on paper differ in the last bits of a float32.
ROUNDING = 1e-5


class PromptRule(NamedTuple):
  """A way to choose prompts before the rollout, as pure functions.

  Attributes:
    init: `num_prompts -> history`, what is remembered of `M` problems.
    select: `(rng, history, ids [N]) -> Selection [N]`; `rng.step` counts the
      same steps as `observe`.
    observe: `(history, step, ids [Q], rewards [Q, G], correct [Q, G],
      lengths [Q, G]) -> history`. Rewards may be shaped; `correct`, in [0, 1],
      is what the verifier says; lengths are in tokens. An id of `M` or more is
      a prompt that was not rolled out and changes nothing.
  """

  init: Callable[..., History]
  select: Callable[..., Selection]
  observe: Callable[..., History]


class TokenRule(NamedTuple):
  """A way to choose tokens of the packed completions, as a pure function.

  The model still reads a token that is not chosen, as context of those after
  it; what it saves is its share of the logits and of their gradient. Only
  tokens of completions that were kept can be chosen.

  Attributes:
    needs_stats: whether `select` reads `TokenStats`, which cost a forward
      pass; otherwise it may be given None for them.
    select: `(rng, batch, stats) -> Selection [*rows, L]`; positions that
      cannot be trained have probability 0.
  """

  needs_stats: bool
  select: Callable[
    [StepRng | jax.Array, PackedBatch, TokenStats | None], Selection
  ]


class Method(NamedTuple):
  """A way to spend rollouts and updates, as pure functions.

  Attributes:
    prompts: chooses prompts before the rollout, from history.
    completions: chooses completions after it, from their groups.
    tokens: chooses tokens of those; None takes all.
    has_statistics_after: advantages are computed again from the completions
      chosen, which makes the gradient another one than the full batch's.
    dynamic_sampling: draws more prompts until enough groups have rewards that
      differ; None draws once.
    has_schedule: what it prunes depends on the number of steps of the run,
      which a resumed run may then not change.
    reads_measured: its rules of prompts and completions read `rng.measured`.
  """

  prompts: PromptRule
  completions: CompletionRule
  tokens: TokenRule | None = None
  has_statistics_after: bool = False
  dynamic_sampling: DynamicSampling | None = None
  has_schedule: bool = False
  reads_measured: bool = False


def every_prompt() -> PromptRule:
  """Keeps all, with probability 1, and remembers nothing."""

  def select(rng, history, ids):
    return Selection(jnp.ones(ids.shape, bool), jnp.ones(ids.shape))

  return PromptRule(
    init=lambda num_prompts: (),
    select=select,
    observe=lambda history, step, ids, rewards, correct, lengths: history,
  )


def every_completion() -> CompletionRule:
  """Keeps all, with probability 1."""

  def rule(rng: StepRng | jax.Array, groups: Groups) -> Selection:
    shape = groups.advantages.shape
    return Selection(jnp.ones(shape, bool), jnp.ones(shape, jnp.float32))

  return rule


def unweighted_prompts(rule: PromptRule) -> PromptRule:
  """`rule` without its correction, and so biased: every probability is 1."""

  def select(rng, history, ids):
    chosen = rule.select(rng, history, ids)
    return chosen.replace(prob=jnp.ones_like(chosen.prob))

  return rule._replace(select=select)


def unweighted(rule: CompletionRule) -> CompletionRule:
  """`rule` as if all were equally likely: biased where they are not.

  Every completion gets the share of those drawn that was kept, so that the
  sum over the unpruned batch's denominators is the mean over what was kept.
  """

  def biased(rng: StepRng | jax.Array, groups: Groups) -> Selection:
    keep = rule(rng, groups).keep
    is_drawn = groups.lengths > 0
    count = lambda x: jnp.maximum(x.sum(dtype=jnp.float32), 1.0)
    share = count(keep & is_drawn) / count(is_drawn)
    return Selection(keep, jnp.full(keep.shape, share))

  return biased


def at_step(
  share: Share, step: int | Int[Array, ""] | None
) -> float | Float[Array, ""]:
  """The share in use at `step`.

  Raises:
    ValueError: for a share that needs a step where there is none.
  """
  if not callable(share):
    return share
  if step is None:
    raise ValueError(
      "rng is a key but the share changes over the run: give the rule a "
      "StepRng(key, step)"
    )
  return share(jnp.asarray(step, jnp.int32))


def trainable(batch: PackedBatch) -> Bool[Array, "*rows L"]:
  """True for the tokens that a token rule may choose."""
  return batch.is_trained & (batch.weights != 0)


def require_stats(stats: TokenStats | None) -> None:
  """Refuses None where a token rule reads statistics.

  Raises:
    ValueError: where there are none.
  """
  if stats is None:
    raise ValueError(
      "stats is None but the rule's needs_stats is True: score the batch first"
    )


def uniform_for_ids(key: jax.Array, ids: Int[Array, "N"]) -> Float[Array, "N"]:
  """A number in [0, 1) for each prompt, which depends on no other prompt."""
  return jax.vmap(jax.random.uniform)(keys_for_ids(key, ids))


check = functools.partial(validation.check, where="config.method.args")


def check_share(name: str, value: float) -> None:
  """Refuses what is no share above 0."""
  check(name, value, lambda x: 0 < x <= 1, "in (0, 1]")


def check_rate(name: str, value: float) -> None:
  """Refuses a pruning rate with which some weight would be infinite."""
  check(
    name,
    value,
    lambda x: 0 <= x < 1,
    "in [0, 1), as at 1 nothing stands for what is dropped",
  )


def check_finite(name: str, value: float) -> None:
  """Refuses what is below 0, or infinite."""
  is_valid = lambda x: 0 <= x < float("inf")
  check(name, value, is_valid, "at least 0 and finite")


def check_whole(name: str, value: int, least: int) -> None:
  """Refuses what is no whole number, or too small a one."""
  is_valid = lambda x: x % 1 == 0 and x >= least
  check(name, value, is_valid, f"a whole number of at least {least}")


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
  """Refuses a word that is not one of the choices."""
  check(name, value, lambda x: x in choices, f"one of {', '.join(choices)}")
