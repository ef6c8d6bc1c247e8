"""The automatic budget in a closed loop: what it predicts comes out.

The policy, the rule and the packer are the package's; rewards and lengths are
random, and a step's seconds follow from its micro-batches.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dppo_jax import methods
from dppo_jax.algo import advantages
from dppo_jax.algo.packing import PackingSpec
from dppo_jax.methods.neyman import budget, rules
from dppo_jax.records import Groups, PromptBatch, Rollout
from dppo_jax.step.pack import count_rows

pytestmark = pytest.mark.slow

NUM = 128  # completions of a step
STEPS, SETTLED = 72, 24
NOISE, WITHIN = 0.4, 0.5
RULE = methods.neyman_completions()

# Tokens of a prompt and of a completion, completions of a prompt, the update's
# part of an unpruned step, and its part that does not depend on micro-batches.
SETTINGS = [
  (10, 100, 8, 0.5, 0.0),
  (500, 100, 8, 0.5, 0.0),
  (1000, 50, 8, 0.5, 0.0),
  (1000, 50, 8, 0.7, 0.0),
  (2000, 100, 4, 0.5, 0.0),
  (10, 100, 8, 0.7, 0.3),
]


def _batch(rng, prompt, completion, size):
  """Groups of rewards that differ, with the prompts and their lengths."""
  shape = NUM // size, size
  around = lambda mean, shape: jnp.array(
    rng.integers(round(mean * 0.7), round(mean * 1.3) + 1, shape), jnp.int32
  )
  rewards = rng.random(shape) < rng.uniform(0.1, 0.9, (shape[0], 1))
  rewards = jnp.array(rewards, jnp.float32)
  lengths = around(completion, shape)
  groups = Groups(rewards, advantages.group_normalized(rewards), lengths)
  return around(prompt, shape[0]), groups


@functools.partial(jax.jit, static_argnames="spec")
def _rows(key, prompt_lengths, groups, fraction, spec):
  """Packed rows of a draw; enough of them for any."""
  chosen = RULE(key, groups, fraction)
  needed = chosen.keep & (groups.advantages != 0)
  wide = lambda *shape: jnp.zeros((*shape, spec.row_length // 2), jnp.int32)
  prompts = PromptBatch(
    prompt_lengths, wide(len(groups.rewards)), prompt_lengths
  )
  rollout = Rollout(
    prompt_lengths,
    wide(*groups.rewards.shape),
    wide(*groups.rewards.shape),
    jnp.where(needed, groups.lengths, 0),
  )
  return count_rows(prompts, rollout, spec)


@jax.jit
def _added(groups, fractions):
  size = rules.gradient_size(groups)
  return WITHIN * budget.added_variance(groups, size, fractions, 0.05)


def simulate(setting, rows_per_micro=2, filled=2.0):
  """Returns the predicted and the true speed-up of the settled loop."""
  prompt, completion, _, share, fixed = setting
  length = int(filled * 1.3 * (prompt + completion)) // 8 * 8
  spec = PackingSpec(length, rows_per_micro)
  micros = lambda *args: float(-(-_rows(*args, spec) // rows_per_micro))
  rng, policy = np.random.default_rng(0), budget.BudgetPolicy()
  first = [_batch(rng, *setting[:3]) for _ in range(8)]
  key = jax.random.key(0)
  mean = np.mean([micros(key, *x, 1.0) for x in first])
  update = lambda m: share * (fixed + (1 - fixed) * m / mean)
  fraction, predicted, full, pruned, added = 1.0, [], [], [], []
  for step in range(STEPS):
    key, batch = jax.random.key(step), _batch(rng, *setting[:3])
    m = micros(key, *batch, fraction)
    # The first step compiles; machines are not even.
    seconds = 9.0 * (step == 0) + update(m) * rng.uniform(0.95, 1.05)
    metrics = {
      "budget/completions": fraction,
      "update/micro_batches": m,
      "update/seconds": seconds,
      "step/seconds": seconds + 1 - share,
      "noise/fraction": NOISE,
    }
    if step >= SETTLED:
      full.append(1 - share + update(micros(key, *batch, 1.0)))
      pruned.append(1 - share + update(m))
      added.append(float(_added(batch[1], jnp.float32([fraction]))[0]))
    if step % 4 != 1:
      fraction, _ = policy(metrics)
      continue
    rows = [_rows(key, *batch, x, spec) for x in budget.FRACTIONS]
    expected = budget.expected_micro_batches(np.array([rows]), rows_per_micro)
    some = np.asarray(_added(batch[1], budget.FRACTIONS))
    fraction, chosen = policy(metrics, some, expected)
    if step >= SETTLED:
      predicted.append(chosen["budget/predicted_speedup"])
  slower = 1 + NOISE * np.mean(added)
  return np.mean(predicted), np.mean(full) / np.mean(pruned) / slower


@pytest.mark.parametrize("filled", [1.0, 3.0])
@pytest.mark.parametrize("setting", SETTINGS)
def test_the_predicted_speed_up_is_the_true_one(setting, filled):
  predicted, true = simulate(setting, filled=filled)
  print(f"{setting} {filled}: predicted {predicted:.3f}, true {true:.3f}")
  assert predicted == pytest.approx(true, rel=0.05)
  assert true > 0.98
