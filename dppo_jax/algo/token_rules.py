"""Which tokens to train on: factories of `TokenRule`, for packed rows.

A token that is not chosen is still read by the model, as the context of those
after it; what it saves is its share of the logits and of their gradient. A
rule can choose trainable cells only: those of a completion that was kept.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from dppo_jax.algo import designs
from dppo_jax.algo.completion_rules import check_share
from dppo_jax.algo.segments import segment_sum
from dppo_jax.keys import Draw
from dppo_jax.records import PackedBatch, Scores, Selection


class TokenRule(NamedTuple):
  """A way to choose tokens, as a pure function.

  Attributes:
    needs_scores: whether `select` reads `Scores`, at the price of a forward
      pass; otherwise it may be given None for them.
    select: `(draw, batch, scores) -> Selection [*rows, L]`; cells that are not
      trainable have probability 0.
  """

  needs_scores: bool
  select: Callable[[Draw, PackedBatch, Scores | None], Selection]


def top_entropy(
  keep: float | Callable[[Int[Array, ""]], Float[Array, ""]],
  scope: str = "batch",
) -> TokenRule:
  """Keeps the tokens of largest |advantage| x entropy; biased.

  The probability it reports is the share kept of the token's completion: a
  mean over a completion's tokens becomes the mean over those kept.

  Args:
    keep: share of the trainable tokens to keep, in (0, 1], or a function from
      the step to it; rounded to a number of tokens, at least one.
    scope: what a token competes with: all others of the "batch", or those of
      its "completion".
  Raises:
    ValueError: for a share or a scope that does not exist.
  Source: D3S, arXiv:2509.22115, token level; the share may follow its
    schedule.
  Deviates:
    1. Ranks over all tokens of the kept samples, as the formula reads; a share
       of each response, as the text can be read, is `scope="completion"`.
    2. Divides by the number of a completion's tokens kept; the paper does not
       say.
    3. Entropy is that of the policy that sampled.
  """
  if not callable(keep):
    check_share(keep, "keep")
  if scope not in ("batch", "completion"):
    raise ValueError(
      f"scope is {scope!r} but must be 'batch' or 'completion'; "
      "see config.method.args"
    )

  def select(draw, batch, scores):
    target = keep(draw.step) if callable(keep) else keep
    trainable = _trainable(batch)
    row_length = trainable.shape[-1]
    count = segment_sum(trainable.astype(jnp.float32), batch.segment_ids)
    if scope == "batch":
      group = jnp.zeros(trainable.shape, jnp.int32)
      quota = _quota(target, trainable.sum(dtype=jnp.float32))
    else:
      rows = jnp.arange(trainable.size // row_length, dtype=jnp.int32)
      first = (rows * (row_length + 1)).reshape(*trainable.shape[:-1], 1)
      group = first + batch.segment_ids
      quota = _quota(target, count)
    score = jnp.abs(batch.advantages) * scores.entropy
    score = jnp.where(trainable, score, -jnp.inf)
    kept = trainable & (_rank(draw.key, group, score) < quota)
    num_kept = segment_sum(kept.astype(jnp.float32), batch.segment_ids)
    share = num_kept / jnp.maximum(count, 1.0)
    return Selection(kept, jnp.where(trainable, share, 0.0))

  return TokenRule(needs_scores=True, select=select)


# (batch, scores) -> what a token may add per unit of |advantage| x weight.
SIZES = {
  "norm": lambda batch, scores: jnp.sqrt(jnp.maximum(scores.norm, 0.0)),
  "entropy": lambda batch, scores: scores.entropy,
  "surprise": lambda batch, scores: -jnp.expm1(batch.old_logprobs),
}


def neyman(
  budget: float,
  min_prob: float = 0.05,
  size: str = "surprise",
) -> TokenRule:
  """Keeps a fixed number of tokens, in proportion to what they may add.

  A token's size is |advantage| x weight x one of `norm`, the length of the
  gradient of its log-probability with respect to the logits; `surprise`, a
  lower bound of it that is known from the rollout, 1 - p; `entropy`. The draw
  is systematic along the rows, so that neighbours exclude each other.

  Args:
    budget: share of the trainable tokens to keep, in (0, 1]; rounded to a
      number of tokens, at least one.
    min_prob: in [0, 1], least probability of a trainable token, which bounds
      its weight; `budget` where that is lower.
    size: a key of `SIZES`.
  Raises:
    ValueError: for a budget, a probability or a size that does not exist.
  Source: Neyman 1934, optimal allocation; D3S, arXiv:2509.22115, for
    choosing tokens after completions.
  """
  check_share(budget, "budget")
  if not 0 <= min_prob <= 1:
    raise ValueError(
      f"min_prob is {min_prob} but must be in [0, 1]; see config.method.args"
    )
  if size not in SIZES:
    raise ValueError(
      f"size is {size!r} but must be one of {', '.join(SIZES)}; "
      "see config.method.args"
    )

  def select(draw, batch, scores):
    trainable = _trainable(batch)
    measure = jnp.maximum(SIZES[size](batch, scores), 0.0)
    measure *= jnp.abs(batch.advantages * batch.weights)
    measure = jnp.where(trainable, measure, 0.0)
    # A size of 0 need not be a gradient of 0: there may be a KL penalty, or a
    # policy that has moved on. Without any chance the token would be a bias.
    largest = measure.max()
    least = jnp.where(largest > 0, largest / designs.GRID, 1.0)
    measure = jnp.where(trainable, jnp.maximum(measure, least), 0.0)
    n = _quota(budget, trainable.sum(dtype=jnp.float32))
    prob = designs.water_filling(measure.reshape(-1), n, min_prob)
    keep = designs.systematic(draw.key, prob, n)
    return Selection(
      keep.reshape(trainable.shape), prob.reshape(trainable.shape)
    )

  return TokenRule(needs_scores=size != "surprise", select=select)


def _trainable(batch: PackedBatch) -> Bool[Array, "*rows L"]:
  return batch.is_trained & (batch.weights != 0)


def _quota(
  share: float | Float[Array, ""], count: Float[Array, "*shape"]
) -> Int[Array, "*shape"]:
  """A share of each count, rounded, and at least one where there is any."""
  share = jnp.asarray(share, jnp.float32)
  return jnp.clip(jnp.round(share * count), 1, count).astype(jnp.int32)


def _rank(
  key: Key[Array, ""],
  group: Int[Array, "*rows L"],
  score: Float[Array, "*rows L"],
) -> Int[Array, "*rows L"]:
  """Place of each cell in its group, 0 for the largest score; ties by lot."""
  lot = jax.random.bits(key, (score.size,))
  group = group.reshape(-1)
  order = jnp.lexsort((lot, -score.reshape(-1), group))
  place = jnp.arange(score.size, dtype=jnp.int32)
  is_first = jnp.diff(group[order], prepend=-1) != 0
  rank = place - jax.lax.cummax(jnp.where(is_first, place, 0))
  return jnp.zeros_like(rank).at[order].set(rank).reshape(score.shape)
