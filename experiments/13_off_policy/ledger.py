"""Exact bias and variance of corrected gradients, by sums over completions."""

from typing import NamedTuple

import numpy as np

from . import corrections, policies

BATCHES = 64, 512  # completions of which the squared error is reported
SHORT, LONG = 3, 6  # lengths: at most, at least


class Setting(NamedTuple):
  """Trained policy, sampling policy, and what depends on both."""

  task: policies.Task
  probs: np.ndarray  # [Q, S], of the completions when they were sampled
  target_probs: np.ndarray  # [Q, S], under the trained policy
  log_ratio: np.ndarray  # [Q, S, L]
  advantage: np.ndarray  # [Q, S, 1], reward minus the prompt's value
  critic: np.ndarray  # [Q, S, L], exact advantages of the tokens
  scores: np.ndarray  # [Q, S, L, P]


def setting(task, trained: np.ndarray, sampled: np.ndarray) -> Setting:
  """Describes completions sampled with other log-probabilities.

  Args:
    trained: parameters of the trained policy.
    sampled: log-probability of each token when it was sampled, `[Q, S, L]`.
      Prefixes of equal tokens must have equal ones.
  """
  logprob = policies.logprobs(task, trained)
  advantage = task.rewards - policies.values(task, logprob)[:, None]
  probs = np.exp(logprob.sum(axis=-1))
  return Setting(
    task,
    np.exp(sampled.sum(axis=-1)),
    probs,
    logprob - sampled,
    advantage[..., None],
    token_advantages(task, probs),
    policies.scores(task, trained),
  )


def token_advantages(task: policies.Task, probs: np.ndarray) -> np.ndarray:
  """Returns the rise of the expected reward by each token, `[Q, S, L]`."""
  after = expected_rewards(task, probs)
  value = (probs * task.rewards).sum(axis=-1)[:, None, None]
  start = np.broadcast_to(value, (*after.shape[:2], 1))
  return after - np.concatenate([start, after[..., :-1]], axis=-1)


def expected_rewards(task: policies.Task, probs: np.ndarray) -> np.ndarray:
  """Returns the expected reward given the tokens up to each, `[Q, S, L]`."""
  num = task.prefix.max() + 1
  sums = lambda x: np.stack(
    [np.bincount(task.prefix.ravel(), _per_token(y, task), num) for y in x]
  )
  expected = sums(probs * task.rewards) / sums(probs)
  return expected[:, task.prefix]


def _per_token(value: np.ndarray, task: policies.Task) -> np.ndarray:
  return np.repeat(value, task.tokens.shape[1])


def target(here: Setting) -> np.ndarray:
  """Returns the gradient of the trained policy's expected reward, `[P]`."""
  weight = here.target_probs * here.advantage[..., 0] / len(here.probs)
  return np.einsum("qs,qslp->p", weight, here.scores)


def factors(here: Setting, rule: corrections.Rule) -> np.ndarray:
  """Returns a rule's factor times the advantage of each token, `[Q, S, L]`."""
  advantage = here.critic if rule.has_critic else here.advantage
  x = corrections.Sampled(here.log_ratio, advantage, here.task.lengths)
  return rule.factor(x) * advantage


def terms(here: Setting, rule: corrections.Rule) -> np.ndarray:
  """Returns the estimate that each completion alone gives, `[Q, S, P]`."""
  return _sum_tokens(factors(here, rule), here.scores)


def _sum_tokens(weight: np.ndarray, scores: np.ndarray) -> np.ndarray:
  return (weight[..., None, :] @ scores)[..., 0, :]


def row(here: Setting, rule: corrections.Rule) -> dict:
  """Returns bias and variance of one completion of a random prompt."""
  values = terms(here, rule)
  probs = here.probs / len(here.probs)
  mean = np.einsum("qs,qsp->p", probs, values)
  second = (probs * np.square(values).sum(axis=-1)).sum()
  return {"rule": rule.name} | errors(target(here), mean, second)


def errors(true: np.ndarray, mean: np.ndarray, second: float) -> dict:
  """Compares an estimate with the true gradient, in units of its length.

  Args:
    mean: expectation of the estimate of one completion.
    second: expectation of its squared length.
  """
  unit = true @ true
  bias = np.square(mean - true).sum() / unit
  variance = (second - mean @ mean) / unit
  length = np.sqrt(mean @ mean)
  return {
    "bias": np.sqrt(bias),
    "cosine": mean @ true / np.sqrt(unit) / length,
    "length": length / np.sqrt(unit),
    "variance": variance,
  } | {f"mse_{n}": bias + variance / n for n in BATCHES}


def drift(here: Setting) -> dict:
  """Returns how far apart the two policies are."""
  task, probs = here.task, here.probs / len(here.probs)
  weight = probs[..., None] * task.is_token
  size = np.abs(here.log_ratio)
  total = here.log_ratio.sum(axis=-1)
  mean = (probs * total).sum()
  return {
    "mean_abs_log_ratio": (weight * size).sum() / weight.sum(),
    "max_ratio": np.exp(here.log_ratio.max()),
    "max_sequence_ratio": np.exp(total.max()),
    "sequence_log_std": np.sqrt((probs * np.square(total - mean)).sum()),
  }


def masked(here: Setting, name: str) -> dict:
  """Returns the masked fraction of the tokens, by length of completion."""
  x = corrections.Sampled(here.log_ratio, here.advantage, here.task.lengths)
  is_masked = corrections.MASKS[name](x) == 0
  weight = here.probs[..., None] * here.task.is_token
  lengths = here.task.lengths
  fraction = lambda which: (
    (weight * is_masked)[:, which].sum() / weight[:, which].sum()
  )
  return {
    "rule": name,
    "masked": fraction(lengths > 0),
    "masked_short": fraction(lengths <= SHORT),
    "masked_long": fraction(lengths >= LONG),
  }
