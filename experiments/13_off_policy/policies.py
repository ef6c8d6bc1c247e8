"""A softmax policy small enough to enumerate, and its gradient steps.

A prompt asks for a number of tokens "2" and then a stop. Completions of up to
eight tokens over {stop, 1, 2} can be listed, so every expectation over them is
a sum. The logits are linear in features that prompts and prefixes share, so
that a step on some completions moves the probabilities of all.
"""

import itertools
from typing import NamedTuple

import numpy as np

STOP, VOCAB, LIMIT = 0, 3, 8
WANTED = (1, 2, 3, 4)  # tokens "2" that each prompt asks for
FEATURES = 24
WARM_UP, WARM_RATE = 20, 4.0  # steps and learning rate before the measurement
BATCH = 64  # completions of an update


class Task(NamedTuple):
  """All completions of all prompts: Q prompts, S completions, L tokens."""

  tokens: np.ndarray  # [S, L], 0 beyond the end
  is_token: np.ndarray  # [S, L]
  lengths: np.ndarray  # [S]
  rewards: np.ndarray  # [Q, S]
  features: np.ndarray  # [Q, S, L, F]
  prefix: np.ndarray  # [S, L], id of the tokens up to and including t


def enumerate_task(limit: int = LIMIT) -> Task:
  """Lists the completions, their rewards and the features of their tokens."""
  listed = [
    (*body, STOP)
    for n in range(limit)
    for body in itertools.product(range(1, VOCAB), repeat=n)
  ]
  listed += itertools.product(range(1, VOCAB), repeat=limit)  # cut off
  lengths = np.array([len(x) for x in listed])
  pad = lambda x: (*x, *[STOP] * (limit - len(x)))
  tokens = np.array([pad(x) for x in listed])
  is_token = np.arange(limit) < lengths[:, None]
  has_ended = (tokens[np.arange(len(tokens)), lengths - 1] == STOP)[None]
  twos = (tokens == 2).sum(axis=1)
  rewards = (twos == np.array(WANTED)[:, None]) & has_ended
  digits = np.where(is_token, tokens + 1, 0) * (VOCAB + 1) ** np.arange(limit)
  prefix = np.unique(np.cumsum(digits, axis=1), return_inverse=True)[1]
  return Task(
    tokens,
    is_token,
    lengths,
    rewards.astype(float),
    _features(tokens),
    prefix.reshape(tokens.shape),
  )


def _features(tokens: np.ndarray) -> np.ndarray:
  """Random features of the prompt, the last token, position and count."""
  before = np.pad(tokens, ((0, 0), (1, 0)), constant_values=STOP)[:, :-1]
  position = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
  count = np.cumsum(before == 2, axis=1)
  shared = np.concatenate(
    [np.eye(VOCAB)[before], position[..., None] / 4, count[..., None] / 2],
    axis=-1,
  )
  num, shape = len(WANTED), tokens.shape
  prompts = np.eye(num)[:, None, None, :]
  inputs = np.concatenate(
    [
      np.broadcast_to(prompts, (num, *shape, num)),
      np.broadcast_to(shared, (num, *shared.shape)),
    ],
    axis=-1,
  )
  generator = np.random.default_rng(0)
  mix = generator.normal(size=(inputs.shape[-1], FEATURES))
  return np.tanh(inputs @ mix) / np.sqrt(FEATURES)


def distributions(task: Task, params: np.ndarray) -> np.ndarray:
  """Returns the probabilities of the next token, `[Q, S, L, V]`."""
  logits = task.features @ params
  logits[..., STOP] -= 1.0  # or an untrained policy would stop too early
  probs = np.exp(logits - logits.max(axis=-1, keepdims=True))
  return probs / probs.sum(axis=-1, keepdims=True)


def logprobs(task: Task, params: np.ndarray) -> np.ndarray:
  """Returns the log-probability of each token, `[Q, S, L]`, 0 beyond ends."""
  chosen = np.take_along_axis(
    distributions(task, params), task.tokens[None, ..., None], axis=-1
  )
  return np.where(task.is_token, np.log(chosen[..., 0]), 0.0)


def scores(task: Task, params: np.ndarray) -> np.ndarray:
  """Returns each token's gradient of its log-probability, `[Q, S, L, P]`."""
  error = np.eye(VOCAB)[task.tokens] - distributions(task, params)
  error = error * task.is_token[..., None]
  outer = task.features[..., :, None] * error[..., None, :]
  return outer.reshape(*outer.shape[:3], -1)


def values(task: Task, logprob: np.ndarray) -> np.ndarray:
  """Returns the expected reward of each prompt under a policy, `[Q]`."""
  return (np.exp(logprob.sum(axis=-1)) * task.rewards).sum(axis=-1)


def gradient(task: Task, params: np.ndarray, counts=None) -> np.ndarray:
  """Returns the gradient of the mean expected reward, `[F, V]`.

  Args:
    counts: weight of each completion, `[Q, S]`; its probability by default.
  """
  probs = distributions(task, params)
  logprob = logprobs(task, params)
  if counts is None:
    counts = np.exp(logprob.sum(axis=-1)) / len(task.rewards)
  weight = counts * (task.rewards - values(task, logprob)[:, None])
  error = (np.eye(VOCAB)[task.tokens] - probs) * task.is_token[..., None]
  error = (error * weight[..., None, None]).reshape(-1, VOCAB)
  return task.features.reshape(-1, FEATURES).T @ error


def warm_up(task: Task, num: int = WARM_UP) -> np.ndarray:
  """Returns the parameters after `num` steps along the exact gradient."""
  params = np.zeros((FEATURES, VOCAB))
  for _ in range(num):
    params = params + WARM_RATE * gradient(task, params)
  return params


def updates(
  task: Task, params: np.ndarray, rate: float, num: int, seed: int
) -> list[np.ndarray]:
  """Returns the parameters before and after each of `num` gradient steps.

  Each step follows the gradient of `BATCH` completions drawn from the current
  policy, as in training: the drift of the policy is mostly noise.
  """
  generator, path = np.random.default_rng(seed), [params]
  for _ in range(num):
    probs = np.exp(logprobs(task, params).sum(axis=-1)) / len(task.rewards)
    drawn = generator.multinomial(BATCH, probs.ravel() / probs.sum())
    counts = drawn.reshape(probs.shape) / BATCH
    params = params + rate * gradient(task, params, counts)
    path.append(params)
  return path
