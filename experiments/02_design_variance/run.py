"""How far from the full batch's gradient does each way of pruning land?

  python experiments/02_design_variance/run.py

For the default task and that of experiment 03: warms up the model, samples one
large batch from it, takes the gradient of every completion, and draws each
method's choice of completions thousands of times at equal tokens trained. A
gradient estimate is a sum of those gradients, so its squared error is a
quadratic form in their inner products. Results go to results.jsonl and
figure.png beside this file.
"""

import argparse
import functools
import json
import pathlib
import platform
import runpy
from typing import NamedTuple

import jax
from jax import flatten_util
import jax.numpy as jnp
from matplotlib import figure as figures
import numpy as np

from dppo_jax import (
  batch,
  checkpoint,
  collect,
  data,
  house,
  keys,
  methods,
  metrics,
  rollout,
  rooms,
  train,
  update,
)
from dppo_jax.algo import completion_rules as rules
from dppo_jax.algo import objectives, packing, prompt_rules, weights
from dppo_jax.records import Groups, PromptBatch, Rollout, Selection

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[1]
BUDGETS = (0.75, 0.5, 0.25, 0.125)
DRAWS = 2000
TOKEN_DRAWS = 32
COLOURS = {
  "uniform": "#9aa5b1",
  "dppo": "#9e2a2b",
  "neyman": "#2a6f97",
  "neyman, true norm": "#6c9a8b",
  "cppo": "#d98e04",
  "d1s": "#7b4b94",
  "pods": "#b56576",
}


class Batch(NamedTuple):
  """A large batch and the gradient of each of its completions.

  Attributes:
    scores: `[U, parameters]`, each completion's gradient at advantage 1.
    products: `[U, U]`, their inner products.
  """

  home: house.House
  params: dict
  prompts: PromptBatch
  rollout: Rollout
  rewards: jax.Array
  scores: np.ndarray
  products: np.ndarray

  @property
  def advantages(self) -> jax.Array:
    return self.home.objective.advantage(self.rewards)

  @property
  def groups(self) -> Groups:
    advantages = self.advantages
    return Groups(
      self.rewards,
      advantages,
      self.rollout.lengths,
      advantages != 0,
      self.home.objective.token_share(self.rollout),
      batch.surprise(self.rollout),
    )

  @property
  def live_tokens(self) -> np.ndarray:
    """`[U]`, the tokens that a full update trains on."""
    is_live = np.asarray(self.advantages != 0)
    return np.where(is_live, self.rollout.lengths, 0).reshape(-1)

  def squared_norm(self, coefficients: np.ndarray) -> np.ndarray:
    """Of the sums of gradients with these coefficients, `[..., U]`."""
    return np.einsum(
      "...u,...u->...", coefficients @ self.products, coefficients
    )


def prepare(config, workdir: pathlib.Path, num_prompts: int) -> Batch:
  """The model after its warm-up, and a batch sampled by it."""
  config.steps = 0
  config.rollout.group_size = 16
  train.run(config, workdir)
  home = house.furnish(config)
  with checkpoint.Checkpoints(workdir, keep=1) as saved:
    params = saved.restore_params(0, rooms.state_like(home).params)
  prompts = data.draw(home.train, home.root_key, 0, num_prompts)
  prompts = jax.tree.map(jnp.asarray, prompts)
  sampled, rewards = sample(home, params, prompts, draw=0)
  scores = score_gradients(home, params, prompts, sampled)
  exact = scores.astype(np.float64)
  return Batch(home, params, prompts, sampled, rewards, scores, exact @ exact.T)


class Sampled(NamedTuple):
  """Completions and their rewards."""

  rollout: Rollout
  rewards: jax.Array


def sample(home: house.House, params, prompts, draw: int) -> Sampled:
  """Graded completions of the prompts; `draw` tells one set from another."""
  r = home.config.rollout
  make = functools.partial(
    rollout.sample,
    model_config=home.model,
    group_size=r.group_size,
    max_tokens=r.max_tokens,
    temperature=r.temperature,
    num_slots=r.num_slots,
    prefill_prompts=r.prefill_prompts,
    stop_ids=home.stop_ids,
  )
  at = keys.draw_at(home.root_key, draw, keys.Room.ROLLOUT)
  sampled = jax.jit(make)(params, prompts=prompts, draw=at)
  with home.make_grader() as grader:
    graded = collect.grade(home, grader, sampled)
  return Sampled(sampled, jnp.asarray(graded.rewards))


def score_gradients(home: house.House, params, prompts, sampled) -> np.ndarray:
  """`[Q * G, parameters]`: gradients at advantage 1, one row each."""
  num = sampled.lengths.size
  lengths = packing.sequence_lengths(prompts.lengths, sampled.lengths)
  longest = int(lengths.max())
  alone = packing.Plan(
    row=jnp.arange(num), offset=jnp.zeros(num, int), num_used=jnp.int32(num)
  )
  ones = jnp.ones(sampled.lengths.shape)
  rows = packing.fill(
    alone,
    prompts,
    sampled,
    ones,
    home.objective.token_share(sampled),
    num,
    longest,
  )
  knobs = update.Settings(
    home.model, home.objective, home.config.rollout.temperature
  )

  def loss(params, row):
    row = jax.tree.map(lambda x: x[None], row)
    new = update.logprobs(params, knobs, row, row.is_trained)
    return objectives.surrogate(
      home.objective,
      new,
      jax.lax.stop_gradient(new),
      row.advantages,
      row.weights,
      row.is_trained,
      row.segment_ids,
    )[0]

  def gradient(row):
    return flatten_util.ravel_pytree(jax.grad(loss)(params, row))[0]

  return np.asarray(
    jax.jit(lambda rows: jax.lax.map(gradient, rows, batch_size=32))(rows)
  )


def coefficients(sampled: Batch, method: methods.Method, num: int, seed=0):
  """`[num, U]` factors of the completions' scores, and tokens trained."""
  keys_ = jax.random.split(jax.random.key(seed), num)
  advantages, groups = sampled.advantages, sampled.groups
  everyone = Selection(
    jnp.ones(groups.rewards.shape[:1], bool), jnp.ones(groups.rewards.shape[:1])
  )

  @jax.jit
  def one(key):
    chosen = method.completions(keys.Draw(key, jnp.int32(0)), groups)
    a = advantages
    if method.has_statistics_after:
      a = sampled.home.objective.advantage(sampled.rewards, chosen.keep)
    weight = weights.horvitz_thompson(everyone, chosen)
    tokens = jnp.where((weight > 0) & (a != 0), groups.lengths, 0).sum()
    return (weight * a).reshape(-1), tokens

  factors, tokens = jax.lax.map(one, keys_, batch_size=64)
  return np.asarray(factors, np.float64), float(np.mean(tokens))


def at_budget(sampled: Batch, make, budget: float):
  """The method whose draws train on `budget` of the tokens, or None.

  Args:
    make: a share to a method; more of it trains on more tokens.
  """
  wanted = budget * sampled.live_tokens.sum()
  draw = keys.Draw(jax.random.key(0), jnp.int32(0))

  def tokens(share):
    chosen = make(share).completions(draw, sampled.groups)
    prob = np.asarray(chosen.prob, np.float64)
    # An unweighted rule reports one number: what it keeps is what it keeps.
    if np.ptp(prob[np.asarray(chosen.keep)]) == 0:
      prob = np.asarray(chosen.keep, np.float64)
    return prob.reshape(-1) @ sampled.live_tokens

  low, high = 1e-3, 1.0
  fewest, most = tokens(low), tokens(high)
  if fewest > 1.02 * wanted:
    return None
  for _ in range(5):  # tokens are nearly linear in the share
    share = low + (high - low) * (wanted - fewest) / max(most - fewest, 1)
    share = min(max(share, low), high)
    found = tokens(share)
    if abs(found - wanted) < 0.005 * wanted:
      break
    if found < wanted:
      low, fewest = share, found
    else:
      high, most = share, found
  return make(share)


def error(sampled: Batch, method: methods.Method) -> dict[str, float]:
  """Squared bias and variance, in units of the full batch's own variance."""
  factors, tokens = coefficients(sampled, method, DRAWS)
  full = np.asarray(sampled.advantages, np.float64).reshape(-1)
  mean = factors.mean(axis=0)
  unit = sampling_variance(sampled)
  variance = sampled.squared_norm(factors - mean).sum() / (DRAWS - 1)
  bias = max(sampled.squared_norm(mean - full) - variance / DRAWS, 0.0)
  product = mean @ sampled.products @ full
  norms = np.sqrt(sampled.squared_norm(mean) * sampled.squared_norm(full))
  return {
    "variance": variance / unit,
    "bias": bias / unit,
    "cosine": product / norms,
    "scale": np.sqrt(sampled.squared_norm(mean) / sampled.squared_norm(full)),
    "tokens": tokens / sampled.live_tokens.sum(),
  }


def sampling_variance(sampled: Batch) -> float:
  """Variance that the choice of these prompts and completions already has.

  The sum over prompts of the squared distance of a prompt's gradient from the
  mean over prompts.
  """
  num, group = sampled.rewards.shape
  full = np.asarray(sampled.advantages, np.float64)
  apart = np.zeros((num, num * group))
  for q in range(num):
    apart[q, q * group : (q + 1) * group] = full[q]
  return sampled.squared_norm(apart - apart.mean(axis=0)).sum()


def completion_methods(sampled: Batch) -> dict:
  """Name to a method of a share; a share of what, `at_budget` finds out."""
  choose = lambda rule: methods.grpo()._replace(completions=rule)
  return {
    "uniform": lambda share: choose(rules.uniform(share)),
    "dppo": lambda share: methods.dppo(0.0, 1 - share),
    "dppo, batch mean": lambda share: methods.dppo(0.0, 1 - share, "batch"),
    "neyman, advantage alone": lambda share: methods.neyman(
      1.0, share, proxy="none"
    ),
    "neyman, length": lambda share: methods.neyman(1.0, share, proxy="length"),
    "neyman": lambda share: methods.neyman(1.0, share),
    "neyman, true norm": lambda share: choose(oracle(sampled, share)),
    "cppo": methods.cppo,
    "cppo, batch": lambda share: methods.cppo(share, "batch"),
    "d1s": methods.d1s,
    "d1s, batch": lambda share: methods.d1s(share, "batch"),
    "pods": methods.pods,
  }


def oracle(sampled: Batch, share: float) -> rules.CompletionRule:
  """The design with each completion's true gradient norm as its size."""
  norms = np.sqrt(np.diag(sampled.products)).reshape(sampled.rewards.shape)
  lengths = np.asarray(sampled.rollout.lengths, np.float32)
  scale = jnp.asarray(norms / lengths, jnp.float32)
  rule = rules.neyman(share, proxy="none")
  return lambda draw, groups: rule(draw, groups.replace(scale=scale))


def fit_length(sampled: Batch) -> dict[str, float]:
  """Least squares of squared gradient norms on L^2 and L, per token share.

  A completion's gradient is its token share times a sum over L tokens, of
  which a part adds up, `c0 L`, and a part does not, `c1 sqrt(L)`.
  """
  lengths = np.asarray(sampled.rollout.lengths, np.float64).reshape(-1)
  share = np.asarray(sampled.groups.scale, np.float64).reshape(-1)
  squares = np.diag(sampled.products) / share**2
  columns = np.stack([lengths**2, lengths], axis=1)
  # Every completion counts alike.
  target, columns = np.ones(len(squares)), columns / squares[:, None]
  (c0, c1), *_ = np.linalg.lstsq(columns, target, rcond=None)
  return {"c0^2": c0, "c1^2": c1, "coherence": max(c0, 0.0) / c1}


def token_errors(sampled: Batch) -> list[dict]:
  """Of methods that choose tokens, from whole gradients of a few draws."""
  home = sampled.home
  knobs = update.Settings(
    home.model, home.objective, home.config.rollout.temperature
  )
  full = np.asarray(sampled.advantages, np.float64).reshape(-1)
  exact = full @ sampled.scores
  found = []
  for name, method in {
    "grpo": methods.grpo(),  # exact, or something is wrong
    "d2s": methods.d2s(0.5, 0.5),
    "d3s, first step": methods.d3s(),
    "neyman, tokens 50%": methods.neyman(1.0, 1.0, 0.5),
    "neyman, completions and tokens 71%": methods.neyman(1.0, 0.707, 0.707),
  }.items():

    @jax.jit
    def estimate(key, method=method):
      at = keys.Draw(key, jnp.int32(0))
      packed, used, _ = batch.select(
        at,
        sampled.prompts,
        sampled.rollout,
        sampled.rewards,
        method=method,
        objective=home.objective,
        rows=home.rows,
        train_zero_advantage=False,
      )
      scores = update.score(sampled.params, knobs, packed, used)
      packed, info = batch.choose_tokens(
        at,
        packed,
        scores,
        method=method,
        objective=home.objective,
        is_on_policy=True,
      )
      total = update.gradient(packed, used, sampled.params, None, knobs)
      return flatten_util.ravel_pytree(total.gradient)[0], info

    drawn = [
      estimate(key) for key in jax.random.split(jax.random.key(1), TOKEN_DRAWS)
    ]
    estimates = np.stack([np.asarray(g, np.float64) for g, _ in drawn])
    tokens = np.mean([float(i["tokens/trained"]) for _, i in drawn])
    mean = estimates.mean(axis=0)
    variance = np.square(estimates - mean).sum() / (TOKEN_DRAWS - 1)
    unit = sampling_variance(sampled)
    bias = np.square(mean - exact).sum() - variance / TOKEN_DRAWS
    found.append(
      {
        "method": name,
        "variance": variance / unit,
        "bias": max(bias, 0.0) / unit,
        "cosine": mean @ exact / np.linalg.norm(mean) / np.linalg.norm(exact),
        "scale": np.linalg.norm(mean) / np.linalg.norm(exact),
        "tokens": tokens / sampled.live_tokens.sum(),
      }
    )
  return found


def prompt_errors(sampled: Batch) -> list[dict]:
  """Of the choice of prompts, from what one earlier visit to each taught."""
  home = sampled.home
  num, group = sampled.rewards.shape
  before = sample(home, sampled.params, sampled.prompts, draw=1)
  lengths = np.asarray(sampled.rollout.lengths).sum(axis=1)
  full = np.asarray(sampled.advantages, np.float64)
  ids = sampled.prompts.ids
  found = []
  for budget in BUDGETS:
    rate = _rate(before.rewards, home, ids, budget)
    for name, rule, is_seen in (
      ("uniform", prompt_rules.neyman_prompts(budget), False),
      ("dppo", rate and prompt_rules.drop_by_history(rate), True),
      ("neyman", prompt_rules.neyman_prompts(budget), True),
    ):
      if not rule:
        found.append({"method": name, "budget": budget, "variance": None})
        continue
      history = rule.init(len(home.train))
      if is_seen:
        history = rule.observe(
          history, jnp.int32(0), ids, before.rewards, before.rollout.lengths
        )
      choose = jax.jit(
        lambda key, rule=rule, history=history: rule.select(
          keys.Draw(key, jnp.int32(1)), history, ids
        )
      )
      drawn = jax.lax.map(choose, jax.random.split(jax.random.key(2), DRAWS))
      keep = np.asarray(drawn.keep)
      factor = np.where(keep, 1 / np.asarray(drawn.prob, np.float64), 0)
      apart = (factor - 1)[..., None] * full
      squares = sampled.squared_norm(apart.reshape(DRAWS, num * group))
      found.append(
        {
          "method": name,
          "budget": budget,
          "variance": squares.mean() / sampling_variance(sampled),
          "prompts": keep.mean(),
          "tokens": (keep @ lengths).mean() / lengths.sum(),
        }
      )
  return found


def _rate(rewards, home, ids, budget: float) -> float | None:
  """The pruning rate at which DPPO keeps `budget` of the prompts, if any."""
  rule = prompt_rules.drop_by_history(0.5)
  history = rule.observe(rule.init(len(home.train)), jnp.int32(0), ids, rewards)
  draw = keys.Draw(jax.random.key(0), jnp.int32(1))
  eligible = float((rule.select(draw, history, ids).prob < 1).mean())
  rate = (1 - budget) / eligible if eligible else 1.0
  return rate if rate < 1 else None


def draw_figure(results: list[dict]) -> None:
  """Added variance, and squared error of the biased, against the budget."""
  batches = list(dict.fromkeys(r["batch"] for r in results))
  figure = figures.Figure(figsize=(9, 4 * len(batches)), layout="constrained")
  axes = figure.subplots(len(batches), 2, squeeze=False)
  for row, name_of_batch in zip(axes, batches, strict=True):
    for axis, names, title in (
      (row[0], list(COLOURS)[:4], "unbiased: variance added"),
      (row[1], [*list(COLOURS)[4:], "neyman"], "squared error of the biased"),
    ):
      for name in names:
        points = [
          (r["budget"], r["variance"] + (r["bias"] if axis is row[1] else 0))
          for r in results
          if (r["batch"], r["level"]) == (name_of_batch, "completions")
          and r["method"] == name
          and r["variance"] is not None
        ]
        if points:
          x, y = zip(*sorted(points), strict=True)
          axis.plot(x, y, marker="o", color=COLOURS[name], label=name)
      axis.set(
        xlabel="share of tokens trained on",
        ylabel="over the full batch's own variance",
        title=f"{name_of_batch}: {title}",
        yscale="log",
        xscale="log",
      )
      axis.set_xticks(BUDGETS, [f"{b:.1%}" for b in BUDGETS])
      axis.minorticks_off()
      axis.grid(alpha=0.25)
      axis.legend()
      axis.spines[["top", "right"]].set_visible(False)
  figure.savefig(HERE / "figure.png", dpi=120)


def table(rows: list[dict]) -> str:
  """Variance, and squared bias of the biased, for each budget."""
  names = list(dict.fromkeys(r["method"] for r in rows))
  budgets = list(dict.fromkeys(r["budget"] for r in rows))
  lines = [
    "| | " + " | ".join(f"{b:.1%}" for b in budgets) + " |",
    "|---|" + "---|" * len(budgets),
  ]
  for name in names:
    cells = []
    for budget in budgets:
      (r,) = [r for r in rows if (r["method"], r["budget"]) == (name, budget)]
      if r["variance"] is None:
        cells.append("–")
      elif r.get("bias", 0) > 0.02 * r["variance"] + 1e-3:
        cells.append(
          f"{r['variance']:.3f} + {r['bias']:.2f} "
          f"(cos {r['cosine']:.2f}, x{r['scale']:.2f})"
        )
      else:
        cells.append(f"{r['variance']:.4f}")
    lines.append(f"| {name} | " + " | ".join(cells) + " |")
  return "\n".join(lines)


def measure(name: str, sampled: Batch) -> list[dict]:
  """All that there is to tell of one batch."""
  live = np.asarray(sampled.advantages != 0).any(axis=1).mean()
  results = [{"level": "batch", "live": live, **fit_length(sampled)}]
  for method, make in completion_methods(sampled).items():
    for budget in BUDGETS:
      chosen = at_budget(sampled, make, budget)
      found = error(sampled, chosen) if chosen else {"variance": None}
      row = {"method": method, "budget": budget, **found}
      results.append({"level": "completions", **row})
      jax.clear_caches()  # or the programs of all shares pile up
  results += [{"level": "prompts", **r} for r in prompt_errors(sampled)]
  results += [
    {"level": "tokens", "budget": 0.5, **r} for r in token_errors(sampled)
  ]
  facts = {
    "batch": name,
    "jax": jax.__version__,
    "machine": platform.processor() or platform.machine(),
  }
  return [r | facts for r in results]


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--prompts", type=int, default=128)
  parser.add_argument("--batches", default="arithmetic,rings")
  parser.add_argument("--workdir", default="runs/02_design_variance")
  args = parser.parse_args()
  workdir = pathlib.Path(args.workdir).absolute()
  rings = HERE.parent / "03_comparison"
  write = runpy.run_path(str(rings / "problems.py"))["write"]
  write(rings / "data", 0, 1536, 512)
  path = HERE / "results.jsonl"
  files = {
    "arithmetic": ROOT / "configs" / "arithmetic.py",
    "rings": rings / "config.py",
  }
  for name in args.batches.split(","):
    config = runpy.run_path(str(files[name]))["get_config"]("grpo")
    rows = measure(name, prepare(config, workdir / name, args.prompts))
    others = [r for r in metrics.read(path) if r["batch"] != name]
    path.write_text(
      "".join(json.dumps(r, default=float) + "\n" for r in [*others, *rows])
    )
    print(f"\n{name}: {rows[0]}")
    for level in ("completions", "prompts", "tokens"):
      of_level = [r for r in rows if r["level"] == level]
      print(f"\n{level}\n{table(of_level)}", flush=True)
  draw_figure(metrics.read(path))


if __name__ == "__main__":
  main()
