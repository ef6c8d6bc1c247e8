# %% [markdown]
# # Comparing methods
#
# Does a method learn sooner, or did it only have a lucky seed? Here we train
# under two methods and two seeds, from this notebook. Then we compare the runs,
# with intervals. The same lines compare runs of hours.
#
# The second half looks at an experiment of the repository that did run for
# hours: 13 variants, five seeds each.

# %%
import contextlib
import io
import json
import pathlib
import runpy
import tempfile
import time

from IPython.display import Image, Markdown, display
import matplotlib.pyplot as plt
import numpy as np

import dppo_jax
from dppo_jax import config, train
from dppo_jax.analysis import compare, runs, statistics, tables

folder = pathlib.Path(tempfile.mkdtemp())

# %% [markdown]
# ## A task
#
# Sums on a clock of five hours, where 3 + 4 is 2. Notebook 05 says how data of
# one's own work.

# %%
task = folder / "clock.py"
task.write_text(r"""
import random


def problem(generator):
  digits = generator.choices(range(5), k=4)
  hour, work = digits[0], ""
  for digit in digits[1:]:
    work += f"{hour}+{digit}={(hour + digit) % 5};"
    hour = (hour + digit) % 5
  return {
    "problem": "+".join(map(str, digits)) + "=",
    "answer": str(hour),
    "solution": rf"{work}\boxed{{{hour}}}",
  }


def every_problem():
  generator, found = random.Random(0), {}
  while len(found) < 600:
    new = problem(generator)
    found[new["problem"]] = new
  return list(found.values())


def training():
  return every_problem()[64:]


def held_out():
  return every_problem()[:64]
""")
example = runpy.run_path(str(task))["held_out"]()[0]
print(*(f"{name:9} {value}" for name, value in example.items()), sep="\n")

# %% [markdown]
# ## Short runs
#
# A fair comparison changes one thing. All runs have one config but for method
# and seed, and all begin with the same weights: those of a run of no steps,
# which only fine-tunes.


# %%
def make_config(method, seed, steps=40, **args):
  c = config.Config()
  config.use_method(c, method)
  c.method.args.update(args)
  c.seed, c.steps = seed, steps
  c.data.train, c.data.eval = f"{task}:training", f"{task}:held_out"
  c.data.prompts_per_step = 16
  c.rollout.group_size = 8
  c.rollout.max_tokens = 24
  c.rollout.num_slots = 128
  c.model.remat = "none"
  c.pack.row_length = 64
  c.pack.rows_per_micro = 8
  c.optimizer.learning_rate = 2e-5
  c.eval.every = 4
  return c


def train_quietly(name, c):
  start = time.time()
  with contextlib.redirect_stdout(io.StringIO()):
    train.run(c, folder / name)
  run = runs.load(folder / name)
  accuracy = [line["eval/accuracy"] for line in run.evals]
  seconds = run.total("step/seconds")
  print(
    f"{name:10} accuracy {accuracy[0]:.2f} to {accuracy[-1]:.2f}, "
    f"{seconds:4.1f} s of training, {time.time() - start:4.0f} s in all"
  )


first = make_config("grpo", seed=0, steps=0)
first.sft.steps = 300
first.sft.direct_share = 0.6  # so that guessing is the likelier start
train_quietly("start", first)

# %% [markdown]
# `grpo` trains on everything. `neyman` rolls out every prompt here too, and
# trains on a quarter of the completions, weighted by 1 / probability.

# %%
VARIANTS = {
  "grpo": {},
  "neyman": {"prompt_budget": 1.0, "completion_budget": 0.25},
}
for seed in (0, 1):
  for method, args in VARIANTS.items():
    c = make_config(method, seed, **args)
    c.sft.from_run = str(folder / "start")
    train_quietly(f"{method}-{seed}", c)

# %% [markdown]
# ## Compared
#
# `compare.group` puts runs together that differ only in their seed, and names
# each group after the options in which it differs from the others. The table is
# that of `python -m dppo_jax.analysis.compare RUN RUN ...`: means over seeds
# with 95% intervals, differences and ratios paired by seed.

# %%
found = [runs.load(folder / f"{m}-{s}") for m in VARIANTS for s in (0, 1)]
groups = compare.group(found)
target = compare.default_target(groups)
display(Markdown(tables.markdown(*compare.table(groups, target))))

# %%
picture = io.BytesIO()
compare.draw(groups, target).savefig(picture, dpi=100)
display(Image(picture.getvalue(), width=800))

# %% [markdown]
# Lines are means over seeds, bands their 95% intervals. Two seeds of half a
# minute prove little, and their intervals are wide. The x axis matters: per
# step both do the same work before the update, but `neyman` trains on a quarter
# of the tokens at most. Seconds are noisy on a machine with other work on it.

# %% [markdown]
# ## What was pruned

# %%
names = ["completions/trained", "tokens/trained", "weights/max"]
print(f"{'mean of a step':14}", *(f"{name:>20}" for name in names))
for run in found:
  means = [run.total(name) / len(run.steps) for name in names]
  print(f"{run.path.name:14}", *(f"{value:20.1f}" for value in means))

# %% [markdown]
# ## An experiment of hours
#
# [Experiment 03](../experiments/03_comparison/README.md) asks which method gets
# to the same accuracy sooner, on a task where two groups of three have no
# variance. Its results are one line a run. They are in the repository, not in
# the installed package: the cells below need a clone.

# %%
clone = pathlib.Path(dppo_jax.__file__).parents[1]
path = clone / "experiments/03_comparison/results.jsonl"
lines = []
if path.exists():
  lines = [json.loads(line) for line in path.read_text().splitlines()]
print(
  len(lines), "runs;", "each has", *list(lines[0] if lines else [])[:6], "..."
)

# %%
COLOURS = {
  "grpo": "#343a40",
  "dppo": "#9e2a2b",
  "greso": "#5f9e6e",
  "cppo": "#d98e04",
  "pods": "#b56576",
  "neyman": "#2a6f97",
  "neyman, completions": "#012a4a",
}
of_variant = {
  name: [line for line in lines if line["variant"] == name] for name in COLOURS
}
figure, axis = plt.subplots(figsize=(7.5, 4.4), layout="constrained")
for name, some in of_variant.items():
  if not some:
    continue
  curves = [(np.array(x["seconds"]), np.array(x["accuracy"])) for x in some]
  x, (y, low, high) = statistics.band(curves)
  colour = COLOURS[name]
  axis.plot(x, y, color=colour, label=name, linewidth=2)
  if name in ("grpo", "neyman, completions"):
    axis.fill_between(x, low, high, color=colour, alpha=0.12, lw=0)
axis.set(xlabel="training seconds", ylabel="held-out accuracy", xlim=(0, 110))
if lines:
  axis.legend(frameon=False, fontsize=9)
axis.spines[["top", "right"]].set_visible(False)
plt.show()

# %% [markdown]
# Means over five seeds; for two of them, bands are 95% intervals. They overlap
# widely: with curves so noisy, one seed could have shown anything. So pair the
# seeds and take differences.

# %%
end = lambda some: {x["seed"]: x["accuracy"][-1] for x in some}
for name, some in of_variant.items():
  if name != "grpo" and some:
    gain = statistics.difference(end(some), end(of_variant["grpo"]))
    print(
      f"{name:20} accuracy {np.mean([*end(some).values()]):.3f}, "
      f"less grpo's {gain.value:+.3f} ({gain.low:+.3f} to {gain.high:+.3f})"
    )

# %% [markdown]
# Rates, too. A smaller share of completions costs fewer tokens. Does it cost
# accuracy? Every dot is a seed.

# %%
RATES = {
  "grpo": "all",
  "neyman": "3/4 of prompts,\n1/4 of completions",
  "neyman, completions": "all prompts,\n1/8 of completions",
  "neyman, less of both": "half of prompts,\n1/8 of completions",
}
figure, axis = plt.subplots(figsize=(7.5, 3.6), layout="constrained")
for place, name in enumerate(RATES):
  some = [line for line in lines if line["variant"] == name]
  y = [line["accuracy"][-1] for line in some]
  axis.plot(np.full(len(y), place), y, "o", color="#2a6f97", alpha=0.6)
  if some:
    axis.plot([place - 0.2, place + 0.2], [np.mean(y)] * 2, color="#343a40")
    tokens = np.mean([line["tokens_trained"] for line in some])
    axis.text(
      place, 1.0, f"{tokens / 1e6:.1f} M tokens", ha="center", fontsize=9
    )
axis.set_xticks(range(len(RATES)), RATES.values())
axis.set(ylabel="accuracy at the end", ylim=(None, 1.03))
axis.spines[["top", "right"]].set_visible(False)
plt.show()

# %% [markdown]
# ## Runs of your own
#
# ```text
# python -m dppo_jax.main --config=configs/arithmetic.py:grpo --config.seed=1
# python -m dppo_jax.analysis.compare runs/arithmetic-*
# ```
#
# Give every method the same seeds and the same first weights
# (`--config.sft.from_run=DIR`), and at least three of them.
