"""The choice of tokens, exactly: from the gradients of single tokens.

Where the choices in different completions do not depend on each other, the
variance of the sum is the sum of theirs, and each is a quadratic form in the
inner products of that completion's token gradients. Those are taken for a
sample of completions, drawn in proportion to their gradients; what is left to
chance is that sample alone. All four choices are unbiased.

  tokens:   each by itself with probability p_t;  sum (1 / p_t - 1) |g_t|^2
  prefixes: up to a random cut, P(cut >= t) = q_t, weight 1 / q_t;
            sum (1 / q_t - 1) (|g_t + ... + g_L|^2 - |g_{t+1} + ... + g_L|^2)
"""

import jax
import jax.numpy as jnp
import numpy as np

from ..common import policy
from .batch import Batch

BUDGETS = (0.5, 0.25, 0.125)
SAMPLE = 96  # completions whose tokens are looked at
LEAST = 0.05  # probability of a token or a prefix in our two designs


def measure(sampled: Batch) -> list[dict]:
  """The added variance of each choice at each budget."""
  rng = np.random.default_rng(0)
  size = np.abs(sampled.factors) * np.sqrt(np.diag(sampled.products))
  chance = size / size.sum()
  picked = rng.choice(len(size), SAMPLE, p=chance)
  grams = token_products(sampled, picked)
  shares = np.asarray(sampled.factors[picked] ** 2 / chance[picked]) / SAMPLE
  rows = []
  for name, rule in RULES.items():
    for budget in BUDGETS:
      probs = rule(sampled, budget)
      is_prefix = name.startswith("prefixes")
      lengths = sampled.live_tokens
      added = [
        share * _added(gram, probs[u, : lengths[u]], is_prefix)
        for u, gram, share in zip(picked, grams, shares, strict=True)
      ]
      spread = np.std(added) * np.sqrt(SAMPLE)
      rows.append(
        {
          "method": name,
          "budget": budget,
          "variance": np.sum(added) / sampled.variance,
          "standard_error": spread / sampled.variance,
          "tokens": probs.sum() / lengths.sum(),
          "rows": _read(probs, lengths, is_prefix) / lengths.sum(),
        }
      )
  return rows


def token_products(sampled: Batch, picked: np.ndarray) -> list[np.ndarray]:
  """`[L, L]` for each: products of its tokens' gradients at advantage 1."""
  run, rollout = sampled.run, sampled.rollout
  gradient = policy.gradient_of(
    run,
    sampled.params,
    sampled.prompts,
    rollout,
    run.spec.objective.token_share(rollout),
  )
  every = jnp.arange(rollout.tokens.shape[2])

  @jax.jit
  def products(u):
    one = lambda t: gradient(u, t, t + 1)
    scores = jax.lax.map(one, every, batch_size=32)
    return scores @ scores.T

  lengths = sampled.live_tokens
  return [
    np.asarray(products(u), np.float64)[: lengths[u], : lengths[u]]
    for u in picked
  ]


def _added(gram: np.ndarray, prob: np.ndarray, is_prefix: bool) -> float:
  """The variance of one completion's sum, at advantage 1."""
  squares = np.diag(gram)
  if is_prefix:
    after = np.triu(gram, 1).sum(axis=1)
    squares = squares + 2 * after
  return float((1 / prob - 1) @ squares)


def _read(probs: np.ndarray, lengths: np.ndarray, is_prefix: bool) -> float:
  """Tokens that the model reads: a mask leaves all of them in the rows."""
  return probs.sum() if is_prefix else lengths.sum()


def _uniform_tokens(sampled: Batch, budget: float) -> np.ndarray:
  """Every token alike."""
  return np.where(_is_token(sampled), budget, 0.0)


def _uniform_prefixes(sampled: Batch, budget: float) -> np.ndarray:
  """A cut that is uniform along the completion, or before its first token.

  A uniform cut alone leaves half of the tokens; less takes completions that
  are left out whole.
  """
  lengths = sampled.live_tokens[:, None]
  left = lengths - np.arange(sampled.rollout.tokens.shape[2])
  q = np.where(left > 0, left / np.maximum(lengths, 1), 0.0)
  return q * min(budget * lengths.sum() / q.sum(), 1.0)


def _sized_tokens(sampled: Batch, budget: float) -> np.ndarray:
  """In proportion to what each may add: |A| times its residual."""
  return _filled(_sizes(sampled), sampled, budget)


def _sized_prefixes(sampled: Batch, budget: float) -> np.ndarray:
  """The cuts of least variance where token gradients are orthogonal.

  Then q_t is in proportion to the size of token t, and where that would grow
  along the completion, to the root of its mean square over a stretch: pools of
  adjacent violators. A pool of all tokens is a choice of completions.
  """
  squares = _sizes(sampled) ** 2
  lengths = sampled.live_tokens
  pooled = [_pool(x[:n]) for x, n in zip(squares, lengths, strict=True)]
  size = np.zeros(squares.shape)
  for row, values in zip(size, pooled, strict=True):
    row[: len(values)] = np.sqrt(values)
  return _filled(size, sampled, budget)


def _pool(values: np.ndarray) -> np.ndarray:
  """The nearest non-increasing sequence, in the sense of least squares."""
  pools: list[tuple[float, int]] = []
  for value in values:
    mean, count = float(value), 1
    while pools and pools[-1][0] < mean:
      other, number = pools.pop()
      mean = (mean * count + other * number) / (count + number)
      count += number
    pools.append((mean, count))
  return np.concatenate([np.full(n, x) for x, n in pools] or [np.zeros(0)])


def _sizes(sampled: Batch) -> np.ndarray:
  """`[U, T]`: |A| x share x (1 - p), what stands for a token's gradient."""
  logprobs = np.asarray(sampled.rollout.logprobs, np.float64)
  residual = 1 - np.exp(logprobs.reshape(len(sampled.factors), -1))
  share = np.asarray(sampled.groups.scale, np.float64).reshape(-1, 1)
  size = np.abs(sampled.factors)[:, None] * share * residual
  return np.where(_is_token(sampled), size, 0.0)


def _is_token(sampled: Batch) -> np.ndarray:
  """`[U, T]`, True for the tokens that a full update trains on."""
  place = np.arange(sampled.rollout.tokens.shape[2])
  return place < sampled.live_tokens[:, None]


def _filled(size: np.ndarray, sampled: Batch, budget: float) -> np.ndarray:
  """`min(scale * size, 1)`, at least `LEAST`, that sums to the budget."""
  is_token = _is_token(sampled)
  wanted = budget * is_token.sum()
  low, high = 0.0, 1e6 / max(size.max(), 1e-30)
  least = min(LEAST, budget)
  for _ in range(200):
    middle = (low + high) / 2
    prob = np.where(is_token, np.clip(middle * size, least, 1.0), 0.0)
    low, high = (middle, high) if prob.sum() < wanted else (low, middle)
  return prob


RULES = {
  "tokens, uniform": _uniform_tokens,
  "prefixes, uniform": _uniform_prefixes,
  "tokens, by size": _sized_tokens,
  "prefixes, by size": _sized_prefixes,
}
