"""Samples of a policy, and the gradients that all bounds follow from.

Letters are those of `dppo_jax.records`; a prompt's `H` completions are cut
into groups of `GROUP`, and `K` groups come of all prompts.
"""

import pathlib
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dppo_jax import train
from dppo_jax.analysis import runs
from dppo_jax.run.setup import Run, setup_run

from ..common import policy, tasks

GROUP = 16
PER_PROMPT = 2 * GROUP
PARTS = 8  # of a completion, whose gradients are taken one by one


class Shares(NamedTuple):
  """Fractions of the seconds of a step, which sum to 1."""

  rollout: float
  update: float

  @property
  def rest(self) -> float:
    return 1.0 - self.rollout - self.update


class Logged(NamedTuple):
  """Groups of completions under one policy.

  Attributes:
    name: of the task and the policy.
    shares: of a training step's seconds.
    prompt: `[K]`, which prompt each group is of; neighbours share one.
    prompt_lengths: `[K]`, tokens.
    rewards: `[K, G]`, 0 or 1.
    lengths: `[K, G]`, tokens.
    logprobs: `[K, G, T]`, nats; 0 past the end.
    products: `[K, G, G]`, inner products of the gradients of the completions'
      log-probabilities, sums over their tokens.
    prompt_scores: `[Q, H, D]`, those gradients, projected at random onto D
      numbers that keep inner products in expectation: for means over prompts.
    parts: `[M, PARTS, PARTS]`, inner products of the gradients of the parts of
      some completions.
    parts_of: `[M]`, which completions, numbered through all groups.
    slots: `num_slots` of the config.
    slot_steps: slots times decode steps, as the package counted them.
  """

  name: str
  shares: Shares
  prompt: np.ndarray
  prompt_lengths: np.ndarray
  rewards: np.ndarray
  lengths: np.ndarray
  logprobs: np.ndarray
  products: np.ndarray
  prompt_scores: np.ndarray
  parts: np.ndarray
  parts_of: np.ndarray
  slots: int
  slot_steps: int


def train_policy(task: str, steps: int, workdir: pathlib.Path) -> Run:
  """Trains GRPO; the checkpoint of step 0 stays."""
  config = tasks.grpo_config(task)
  config.steps = steps
  config.rollout.group_size = GROUP
  config.eval.every = steps
  config.log.writers = ""
  train.run(config, workdir)
  config.rollout.group_size = PER_PROMPT
  return setup_run(config)


def measured_shares(workdir: pathlib.Path) -> Shares:
  """Returns the fractions of the run's steps after the first ten."""
  lines = runs.load(workdir).steps[10:]
  of = lambda name: sum(line.get(f"{name}/seconds", 0.0) for line in lines)
  total = sum(of(stage) for stage in runs.STAGES)
  return Shares(of("rollout") / total, of("update") / total)


def load(path: pathlib.Path) -> Logged:
  """Reads a file that `save` wrote."""
  with np.load(path) as file:
    log = Logged(**file)
  return log._replace(
    name=str(log.name),
    shares=Shares(*log.shares.tolist()),
    slots=int(log.slots),
    slot_steps=int(log.slot_steps),
  )


def save(log: Logged, path: pathlib.Path) -> None:
  with path.open("wb") as file:
    np.savez(file, **log._asdict())


def collect(
  name: str, run: Run, workdir: pathlib.Path, step: int, num_prompts: int
) -> Logged:
  """Completions of the policy of `step`, and their gradients."""
  params, prompts = policy.restore(run, workdir, step, num_prompts)
  # The steps of training used the draws up to config.steps.
  draw = run.config.steps + 1
  sampled, rewards = policy.sample(run, params, prompts, draw)
  rewards = np.asarray(rewards, np.float64)
  products, projected, parts, parts_of = _gradients(
    run, params, prompts, sampled, rewards
  )
  groups = num_prompts * PER_PROMPT // GROUP
  lengths = np.asarray(sampled.lengths).reshape(groups, GROUP)
  logprobs = np.asarray(sampled.logprobs).reshape(groups, GROUP, -1)
  is_token = np.arange(logprobs.shape[2]) < lengths[..., None]
  each = PER_PROMPT // GROUP
  return Logged(
    name=name,
    shares=measured_shares(workdir),
    prompt=np.repeat(np.arange(num_prompts), each),
    prompt_lengths=np.repeat(np.asarray(prompts.lengths), each),
    rewards=rewards.reshape(groups, GROUP),
    lengths=lengths,
    logprobs=np.where(is_token, logprobs, 0.0),
    products=products,
    prompt_scores=projected,
    parts=parts,
    parts_of=parts_of,
    slots=run.config.rollout.num_slots,
    slot_steps=int(sampled.slot_steps),
  )


def _gradients(run, params, prompts, sampled, rewards):
  """Inner products within groups, projections, and those of parts."""
  ones = jnp.ones(sampled.lengths.shape)
  of = policy.gradient_of(run, params, prompts, sampled, ones)
  many = jax.jit(
    lambda us, start, end: jax.lax.map(
      lambda x: of(*x), (us, start, end), batch_size=32
    )
  )
  num, each = sampled.lengths.shape
  longest = jnp.full((each,), sampled.tokens.shape[2])
  generator, sketch = np.random.default_rng(0), None
  products, projected = [], []
  for q in range(num):
    us = q * each + jnp.arange(each)
    scores = np.asarray(many(us, 0 * longest, longest), np.float32)
    if sketch is None:
      signs = generator.integers(0, 2, (scores.shape[1], 512)) * 2 - 1
      sketch = signs.astype(np.float32) / 512**0.5
    projected.append(scores @ sketch)
    for group in np.split(scores.astype(np.float64), each // GROUP):
      products.append(group @ group.T)

  # Parts, of completions that have an advantage.
  is_live = np.ptp(rewards, axis=1) > 0
  live = np.flatnonzero(np.repeat(is_live, each))
  chosen = generator.choice(live, min(len(live), 256), replace=False)
  lengths, parts = np.asarray(sampled.lengths).reshape(-1), []
  for block in np.array_split(chosen, max(1, len(chosen) // 4)):
    edges = np.arange(PARTS + 1) * lengths[block][:, None] // PARTS
    flat = lambda x: jnp.asarray(x.reshape(-1))
    us = flat(np.repeat(block, PARTS))
    scores = np.asarray(many(us, flat(edges[:, :-1]), flat(edges[:, 1:])))
    scores = scores.astype(np.float64).reshape(len(block), PARTS, -1)
    parts += list(scores @ scores.transpose(0, 2, 1))
  return np.stack(products), np.stack(projected), np.stack(parts), chosen
