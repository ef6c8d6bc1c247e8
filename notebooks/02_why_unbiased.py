# %% [markdown]
# # Why the weights are 1/probability
#
# Training on fewer completions is easy. Training on fewer *without changing
# what is learnt* needs one rule: what was kept with probability `p` counts
# `1/p`.
#
# Here the example is so small that nothing is sampled. We list every outcome of
# every draw, with its chance, and take the mean exactly. Rules with the weight
# 1/p hit the full gradient. Well-known rules without it miss, and you see where
# they land instead.

# %%
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from matplotlib import lines as artists
import matplotlib.pyplot as plt
import numpy as np

from dppo_jax import algo, methods
from dppo_jax.algo import designs
from dppo_jax.records import Groups, Selection

# %% [markdown]
# ## A policy with two parameters
#
# `Q` = 2 prompts, and `V` = 6 possible answers to each. Every answer has two
# features. The policy is a softmax of features times parameters. Two parameters
# mean that a gradient is an arrow on paper.
#
# `G` = 4 completions of each prompt are sampled and graded. The rewards are of
# a verifier with partial credit, so all of them differ.

# %%
Q, G, V = 2, 4, 6


class Batch(NamedTuple):
  features: np.ndarray  # [Q, V, 2]
  theta: np.ndarray  # [2], the parameters
  answers: np.ndarray  # [Q, G]
  rewards: np.ndarray  # [Q, G]


def make_batch(seed):
  rng = np.random.default_rng(seed)
  features = rng.normal(size=(Q, V, 2))
  features /= np.linalg.norm(features, axis=-1, keepdims=True)
  theta = 0.3 * rng.normal(size=2)
  probs = np.exp(features @ theta)
  probs /= probs.sum(axis=1, keepdims=True)
  answers = np.array([rng.choice(V, G, p=p) for p in probs])
  rewards = rng.beta(0.5, 0.7, size=(Q, G))
  f32 = np.float32
  return Batch(features.astype(f32), theta.astype(f32), answers, f32(rewards))


batch = make_batch(0)
advantages = np.array(algo.group_normalized(batch.rewards))
print("answers   ", batch.answers.shape, "[Q, G]")
print("rewards   ", batch.rewards.shape, "[Q, G]")
print(batch.rewards.round(2))
print("advantages", advantages.shape, "[Q, G]")
print(advantages.round(2))

# %% [markdown]
# ## The full gradient
#
# The loss is the package's own clipped surrogate. It is a *sum* over
# completions, each with a weight, divided at the end by the number of
# completions in the unpruned batch. That number never depends on what was kept.

# %%
objective = algo.grpo()


def loss(theta, batch, weights, advantages):
  """Weighted loss of a batch; `weights` and `advantages` are [Q, G]."""
  logprobs = jax.nn.log_softmax(batch.features @ theta)
  logprobs = jnp.take_along_axis(logprobs, batch.answers, axis=1)
  total, _ = algo.surrogate(
    objective,
    logprobs,
    jax.lax.stop_gradient(logprobs),  # those of the sampling policy
    advantages,
    weights,
    jnp.ones((Q, G), bool),
  )
  return total / (Q * G)


_gradients = jax.jit(jax.vmap(jax.grad(loss), (None, None, 0, None)))


def gradients(weights, advantages=advantages, batch=batch):
  """`[K, 2]`, a gradient for each choice of weights `[K, Q, G]`."""
  weights = jnp.asarray(weights, jnp.float32)
  return np.array(_gradients(batch.theta, batch, weights, advantages))


full = gradients(np.ones((1, Q, G)))[0]
print("the full gradient:", full)

# %% [markdown]
# ## How likely each completion is to be kept
#
# A completion rule looks at whole groups and returns a `Selection`: what it
# keeps, and the probability with which it keeps it.
#
# - **uniform** keeps each with probability 1/2.
# - **dppo** keeps large advantages for certain, and small ones with
#   probability 1/2.
# - **neyman** keeps exactly half of them, in proportion to |advantage|.


# %%
def uniform(keep=0.5):
  def rule(key, groups):
    prob = jnp.full((Q, G), keep)
    return Selection(algo.bernoulli(key, prob), prob)

  return rule


groups = Groups(
  batch.rewards, jnp.array(advantages), lengths=jnp.ones((Q, G), jnp.int32)
)
key = jax.random.key(0)
rules = {
  "uniform": uniform(0.5),
  "dppo": methods.drop_small_advantage(0.5),
  "neyman": methods.neyman_completions(0.5),
}
probs = {name: np.array(r(key, groups).prob) for name, r in rules.items()}
for name, prob in probs.items():
  print(f"{name}: {prob.sum():.2f} of {prob.size} kept on average")
  print(prob.round(2))

# %%
COLOURS = {
  "uniform": "#8a95a1",
  "dppo": "#9e2a2b",
  "neyman": "#2a6f97",
  "cppo": "#d98e04",
  "pods": "#b56576",
  "dppo, weights 1": "#7b4b94",
}
figure, axis = plt.subplots(figsize=(6, 3.6), layout="constrained")
size = np.abs(advantages).reshape(-1)
order = np.argsort(size)
for name, prob in probs.items():
  axis.plot(
    size[order],
    prob.reshape(-1)[order],
    "o-",
    color=COLOURS[name],
    label=name,
    markersize=6,
  )
axis.set(
  xlabel="|advantage|", ylabel="probability of being kept", ylim=(0, 1.1)
)
axis.legend(frameon=False)
axis.spines[["top", "right"]].set_visible(False)
plt.show()

# %% [markdown]
# ## Every outcome
#
# *uniform* and *dppo* toss one coin for each completion: with 8 completions
# there are at most 2⁸ = 256 outcomes.
#
# *neyman* makes a **systematic** draw. Lay the probabilities end to end on a
# line and put a mark every 1 along it, the first at a random offset. An item
# that a mark hits is kept. So one random number decides everything, the number
# kept is fixed, and only a few outcomes exist: one for each
# stretch of offsets between which nothing changes.


# %%
def coin_outcomes(prob):
  """Chances `[K]` and choices `[K, Q, G]` of independent draws."""
  keep = np.array(list(itertools.product([False, True], repeat=prob.size)))
  keep = keep.reshape(-1, *prob.shape)
  chance = np.where(keep, prob, 1 - prob).prod((1, 2), dtype=np.float64)
  return chance[chance > 0], keep[chance > 0]


draw_at = jax.jit(jax.vmap(designs.systematic_at, (0, None)))


def systematic_outcomes(prob):
  """Chances `[K]` and choices `[K, Q, G]` of a systematic draw."""
  # Probabilities are multiples of 1 / GRID, so that all of this is exact.
  units = (prob.reshape(-1) * designs.GRID).astype(np.int64)
  starts = np.unique(np.append(np.cumsum(units) % designs.GRID, 0))
  chance = np.diff(np.append(starts, designs.GRID)) / designs.GRID
  offsets = np.zeros(prob.size + 1, np.uint32)  # always as many: one program
  offsets[: len(starts)] = starts
  keep = np.array(draw_at(offsets, prob.reshape(-1)))[: len(starts)]
  return chance, keep.reshape(-1, *prob.shape)


outcomes = {
  "uniform": coin_outcomes(probs["uniform"]),
  "dppo": coin_outcomes(probs["dppo"]),
  "neyman": systematic_outcomes(probs["neyman"]),
}
for name, (chance, keep) in outcomes.items():
  print(
    f"{name:8} {len(chance):4} outcomes, chances sum to {chance.sum():.9f}, "
    f"{keep.sum((1, 2)).min()} to {keep.sum((1, 2)).max()} completions kept"
  )

# %%
chance, keep = outcomes["neyman"]
print("all outcomes of neyman:")
for p, choice in zip(chance, keep.astype(int), strict=True):
  print(f"  chance {p:.3f}  keeps {choice.tolist()}")

# %% [markdown]
# ## The weight 1/probability
#
# `horvitz_thompson` turns choices into weights: 1/p for what was kept, 0 for
# what was not. Why this is right takes one line. A completion adds `g / p` with
# probability `p`, and nothing otherwise. On average that is `p · g / p = g`,
# for any `p` above 0.


# %%
def weights_of(keep, prob):
  """`[K, Q, G]`, one set of weights for each outcome."""
  weigh = lambda k: algo.horvitz_thompson(Selection(k, jnp.array(prob)))
  return np.array(jax.vmap(weigh)(jnp.array(keep)))


estimates = {}
for name, (chance, keep) in outcomes.items():
  estimates[name] = chance, gradients(weights_of(keep, probs[name]))

print(f"{'full':8}", full)
for name, (chance, values) in estimates.items():
  mean = chance @ values
  print(f"{name:8}", mean, f"  off by {np.abs(mean - full).max():.0e}")
  np.testing.assert_allclose(mean, full, atol=1e-6)

# %% [markdown]
# All three means are the full gradient, to the rounding of float32. The rules
# could hardly differ more, and the mean does not notice.
#
# ## Rules that miss
#
# - **cppo** keeps the half with the largest |advantage| and averages over it.
#   Nothing is random. What is small is never seen.
# - **pods** keeps the half whose rewards vary most, and computes advantages
#   again from those.
# - **dppo, weights 1** draws as dppo does and forgets the weights.

# %%
half = np.ones(1)  # the chance of the one outcome


def one_outcome(method):
  """The gradient of a rule without chance."""
  chosen = method.completions(key, groups)
  weights = algo.horvitz_thompson(chosen)
  if method.has_statistics_after:
    return gradients(
      weights[None], algo.group_normalized(batch.rewards, chosen.keep)
    )
  return gradients(weights[None])


estimates["cppo"] = half, one_outcome(methods.cppo(0.5))
estimates["pods"] = half, one_outcome(methods.pods(0.5))
chance, keep = outcomes["dppo"]
estimates["dppo, weights 1"] = chance, gradients(keep.astype(np.float32))

length = np.linalg.norm(full)
for name in ("cppo", "pods", "dppo, weights 1"):
  chance, values = estimates[name]
  mean = chance @ values
  bias = np.linalg.norm(mean - full) / length
  angle = np.degrees(np.arctan2(*mean[::-1]) - np.arctan2(*full[::-1]))
  print(
    f"{name:16} {mean}  bias {bias:4.0%} of the full gradient's length", end=""
  )
  print(f", turned by {angle:.0f}°")
  assert bias > 0.05

# %% [markdown]
# ## All of it in one picture
#
# Each dot is the gradient of one outcome, larger where it is likelier. The ring
# is the full gradient. The cross is the mean over all outcomes.

# %%
figure, axes = plt.subplots(
  2, 3, figsize=(9.5, 6), sharex=True, sharey=True, layout="constrained"
)
for axis, (name, (chance, values)) in zip(
  axes.flat, estimates.items(), strict=True
):
  mean = chance @ values
  area = 20 + 400 * chance / max(chance.max(), 0.1)
  axis.scatter(*values.T, s=area, color=COLOURS[name], alpha=0.35, linewidth=0)
  axis.plot(*full, "o", markersize=15, fillstyle="none", color="black")
  axis.plot(*mean, "x", markersize=9, markeredgewidth=2.5, color="black")
  bias = np.linalg.norm(mean - full) / length
  verdict = "unbiased" if bias < 1e-5 else f"bias {bias:.0%}"
  axis.set_title(f"{name}: {verdict}", loc="left")
  axis.axhline(0, color="#c3c9d1", linewidth=0.8, zorder=0)
  axis.axvline(0, color="#c3c9d1", linewidth=0.8, zorder=0)
  axis.spines[["top", "right"]].set_visible(False)
figure.supxlabel("gradient of the first parameter")
figure.supylabel("gradient of the second parameter")
entries = {
  "an outcome": {"marker": "o", "color": "#8a95a1", "alpha": 0.5},
  "full gradient": {"marker": "o", "color": "black", "fillstyle": "none"},
  "mean over all outcomes": {"marker": "x", "color": "black"},
}
figure.legend(
  handles=[
    artists.Line2D([], [], ls="", markersize=9, label=name, **style)
    for name, style in entries.items()
  ],
  loc="outside upper center",
  ncols=3,
  frameon=False,
)
plt.show()

# %% [markdown]
# In the upper row the cross lies in the ring. In the lower row it does not, and
# no number of steps would bring it there: the error has a direction.
#
# ## What is paid instead: variance
#
# The weight 1/p removes the bias, not the noise. How much noise there is
# depends on the probabilities. Below is the squared error of the gradient
# against the fraction of completions kept: the mean over 40 batches as the one
# above, for each of them a sum over all outcomes again. The unit is the sum of
# the completions' own squared gradients, which is how noisy the full batch is.


# %%
def squared_error(chance, weights, parts):
  """Returns that of weighted sums of `parts [Q * G, 2]`, over their squares."""
  estimates = weights.reshape(len(chance), -1) @ parts
  error = np.square(estimates - parts.sum(axis=0)).sum(axis=1)
  return chance @ error / np.square(parts).sum()


def weighted(outcomes, prob):
  chance, keep = outcomes
  return chance, keep / prob


fill = jax.jit(algo.water_filling, static_argnums=2)
one_by_one = np.eye(Q * G).reshape(-1, Q, G)


def errors(seed):
  """`(rule, setting, fraction kept, squared error)` on one batch."""
  some = make_batch(seed)
  a = np.array(algo.group_normalized(some.rewards))
  parts = gradients(one_by_one, a, some)  # the loss is linear in the weights
  for n in range(2, Q * G + 1):
    fraction = n / (Q * G)
    prob = np.full((Q, G), fraction)
    design = weighted(coin_outcomes(prob), prob)
    yield "uniform", n, fraction, squared_error(*design, parts)
    # The probabilities of neyman_completions, for `n` to keep.
    prob = np.array(fill(np.abs(a).reshape(-1), n, 0.05)).reshape(Q, G)
    design = weighted(systematic_outcomes(prob), prob)
    yield "neyman", n, fraction, squared_error(*design, parts)
    if n % Q == 0:  # cppo takes as many of each group
      rank = np.argsort(np.argsort(-np.abs(a), axis=1), axis=1)
      weights = (rank < n // Q) / fraction
      yield "cppo", n, fraction, squared_error(np.ones(1), weights[None], parts)
  is_small = np.abs(a) < np.abs(a).mean(axis=1, keepdims=True)
  for rate in (0.0, 0.2, 0.4, 0.6, 0.8, 0.9):
    prob = np.where(is_small, 1 - rate, 1.0)
    design = weighted(coin_outcomes(prob), prob)
    yield "dppo", rate, prob.mean(), squared_error(*design, parts)


results = [line for seed in range(40) for line in errors(seed)]
curves = {}
for name, setting in dict.fromkeys(line[:2] for line in results):
  points = [line[2:] for line in results if line[:2] == (name, setting)]
  curves.setdefault(name, []).append(np.mean(points, axis=0))
print({name: len(points) for name, points in curves.items()}, "points")

# %%
figure, axis = plt.subplots(figsize=(6.5, 4), layout="constrained")
for name, points in curves.items():
  label, style = name, "o-"
  if name == "cppo":
    label, style = "cppo (bias, not noise)", "o--"
  x, y = np.array(points).T
  axis.plot(x, y, style, color=COLOURS[name], label=label, markersize=5)
axis.set(
  xlabel="fraction of the completions kept",
  ylabel="squared error (1: the full batch's noise)",
  xlim=(0.2, 1.02),
  ylim=(-0.05, 3.2),
)
axis.legend(frameon=False)
axis.spines[["top", "right"]].set_visible(False)
plt.show()

# %% [markdown]
# At equal cost, probabilities in proportion to what a completion adds make less
# noise than a coin. dppo cannot keep fewer than its large ones, and pays much
# for the last few.
#
# Bias and variance do not weigh the same. Noise averages out over steps, bias
# does not.
#
# ## Prompts and completions together
#
# Prompts are pruned *before* the rollout, from what was seen at earlier visits.
# A completion then remains with probability (of its prompt) x (its own, given
# the prompt), and the weight is 1 over that product. Here prompt 1 is rolled
# out with probability 0.6.

# %%
prompt_prob = np.array([1.0, 0.6], np.float32)
mean, total = np.zeros(2), 0.0
for is_rolled_out in (False, True):
  prompts = Selection(
    keep=jnp.array([True, is_rolled_out]), prob=jnp.array(prompt_prob)
  )
  chance_of_prompts = prompt_prob[1] if is_rolled_out else 1 - prompt_prob[1]
  chance, keep = outcomes["dppo"]
  weigh = lambda k, p=prompts: algo.horvitz_thompson(
    p, Selection(k, jnp.array(probs["dppo"]))
  )
  values = gradients(jax.vmap(weigh)(jnp.array(keep)))
  mean += chance_of_prompts * (chance @ values)
  total += chance_of_prompts * chance.sum()
print(f"chances sum to {total:.6f}")
print("mean:", mean, f"  off by {np.abs(mean - full).max():.0e}")
np.testing.assert_allclose(mean, full, atol=1e-6)

# %% [markdown]
# ## Limits of unbiasedness
#
# The *gradient* is unbiased. The *step* that an optimizer makes of it is not a
# linear function of the gradient. Two examples on the outcomes of dppo:
#
# - clipping by norm: a gradient that happens to be long is cut, a short
#   one is not;
# - AdamW's first step is the sign of each coordinate and ignores its size.


# %%
def clip(x, norm):
  return x * norm / np.maximum(np.linalg.norm(x, axis=-1, keepdims=True), norm)


for name in ("uniform", "dppo", "neyman"):
  chance, values = estimates[name]
  clipped = np.linalg.norm(chance @ clip(values, length)) / length
  signs = chance @ np.sign(values)
  print(
    f"{name:8} mean after clipping at the full gradient's norm: {clipped:.2f} "
    f"of it; mean sign {signs.round(2)}, full {np.sign(full)}"
  )

# %% [markdown]
# So less noise is worth having even where there is no bias. And two more
# limits. With `inner_updates` above 1 the second update starts from weights
# that already depend on the draw. And an objective whose denominator is itself
# estimated from what was kept (`dapo` with pruned prompts) is a ratio of two
# estimates: give it `tokens_per_completion`.
#
# ## Where this is in the code
#
# - [`algo/designs.py`](../dppo_jax/algo/designs.py): probabilities and draws.
# - [`algo/weights.py`](../dppo_jax/algo/weights.py): `horvitz_thompson`.
# - [`tests/test_exactness.py`](../tests/test_exactness.py): the same
#   enumeration on a transformer, with clipping and KL, for every method and
#   objective.
