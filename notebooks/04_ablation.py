# %% [markdown]
# # Comparing methods
#
# Does a method learn faster, or did it have a lucky seed? Here we train with
# two methods and two seeds, in this notebook. Then we compare the runs, with
# intervals. The same code compares runs that take hours.
#
# The second half reads the results of an experiment of the repository that did
# take hours: 48 runs of 11 variants, with five seeds each for most of them.

# %%
import collections
import contextlib
import io
import json
import pathlib
import runpy
import tempfile
import time

from IPython.display import Image, Markdown, display
from matplotlib import lines as artists
from matplotlib import patches
import matplotlib.pyplot as plt
import numpy as np

import dppo_jax
from dppo_jax import config, train
from dppo_jax.analysis import compare, runs, statistics, tables

folder = pathlib.Path(tempfile.mkdtemp())

# %% [markdown]
# ## A task
#
# Sums on a clock of five hours, where 3 + 4 is 2. Six in ten of the solutions
# to imitate are guesses. So the model guesses too at first, and learns to show
# its work. Notebook 05 explains how to use your own data.

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
  solution = rf"{work}\boxed{{{hour}}}"
  if generator.random() < 0.6:
    solution = rf"\boxed{{{generator.randrange(5)}}}"  # a guess
  return {
    "problem": "+".join(map(str, digits)) + "=",
    "answer": str(hour),
    "solution": solution,
  }


def every_problem():
  generator, problems = random.Random(0), {}
  while len(problems) < 600:
    new = problem(generator)
    problems[new["problem"]] = new
  return list(problems.values())


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
# A fair comparison changes one thing. All runs have the same config except for
# the method and the seed. All start from the same weights: those of a run of
# zero steps, which only fine-tunes.


# %%
def make_config(method, seed, steps=80, **args):
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
  c.optimizer.learning_rate = 5e-5
  c.eval.every = 8
  c.eval.samples = 4  # accuracy is sampled, as GRPO optimises it
  return c


def train_quietly(name, c):
  start = time.time()
  with contextlib.redirect_stdout(io.StringIO()):
    train.run(c, folder / name)
  run = runs.load(folder / name)
  accuracy = [line["eval/accuracy"] for line in run.evals]
  seconds = run.total("step/seconds")
  print(
    f"{name:10} sampled accuracy {accuracy[0]:.2f} to {accuracy[-1]:.2f}, "
    f"{seconds:4.1f} s of training, {time.time() - start:4.0f} s in total"
  )


first = make_config("grpo", seed=0, steps=0)
first.sft.steps = 300
train_quietly("start", first)

# %% [markdown]
# `grpo` trains on every completion. `neyman` also rolls out every prompt here,
# but trains on at most a quarter of the completions, weighted by
# 1 / probability.

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
# `compare.group` groups runs that differ only in their seed, and names each
# group after the options in which it differs from the others.
# `python -m dppo_jax.analysis.compare RUN RUN ...` prints the same table: means
# over seeds with 95% intervals, and differences and ratios paired by seed.

# %%
trained = [runs.load(folder / f"{m}-{s}") for m in VARIANTS for s in (0, 1)]
groups = compare.group(trained)
target = compare.default_target(groups)
display(Markdown(tables.markdown(*compare.table(groups, target))))

# %%
picture = io.BytesIO()
compare.plot(groups, target).savefig(picture, dpi=100)
display(Image(picture.getvalue(), width=800))

# %% [markdown]
# Lines are means over seeds, bands their 95% intervals, and the dotted line is
# the target of the table. Two short seeds prove little: their intervals are
# wide. The x axis matters: per step both do the same work before the update,
# but `neyman` trains on fewer tokens. Seconds are noisy if the machine does
# other work.

# %% [markdown]
# ## What was pruned

# %%
names = ["completions/trained", "tokens/trained", "weights/max"]
print(f"{'mean of a step':14}", *(f"{name:>20}" for name in names))
for run in trained:
  means = [run.total(name) / len(run.steps) for name in names]
  print(f"{run.path.name:14}", *(f"{value:20.1f}" for value in means))

# %% [markdown]
# ## An experiment of hours
#
# [Experiment 03](../experiments/03_comparison/README.md) asks which method
# reaches the same accuracy first, on a task where two groups of three have zero
# variance. Its results are one line per run. They are in the repository, not in
# the installed package: the cells below need a clone.

# %%
clone = pathlib.Path(dppo_jax.__file__).parents[1]
path = clone / "experiments/03_comparison/results.jsonl"
if not path.exists():
  raise FileNotFoundError(
    f"{path} is missing. Clone the repository and install it with "
    "`pip install -e .` to run the cells below."
  )
results = [json.loads(line) for line in path.read_text().splitlines()]
seeds = collections.Counter(line["variant"] for line in results)
print(len(results), "runs of", len(seeds), "variants")
for name, count in seeds.items():
  print(f"{name:24} {count} seeds")


def runs_of(variant):
  """The results of a variant; an error if it has none."""
  chosen = [line for line in results if line["variant"] == variant]
  if not chosen:
    raise ValueError(
      f"{path.name} has no run of variant {variant!r}. "
      f"It has: {', '.join(map(repr, seeds))}."
    )
  return chosen


# %% [markdown]
# Accuracy against training seconds, for seven of them.

# %%
COLOURS = {
  "grpo, all tokens": "#9aa5b1",
  "grpo": "#343a40",
  "grpo, groups of 4": "#5f9e6e",
  "dppo": "#9e2a2b",
  "pods": "#d98e04",
  "neyman": "#012a4a",
  "neyman, an eighth": "#2a6f97",
}
WITH_BAND = ("grpo", "neyman")
figure, axis = plt.subplots(figsize=(7.5, 4.4), layout="constrained")
for name, colour in COLOURS.items():
  members = runs_of(name)
  curves = [(np.array(x["seconds"]), np.array(x["accuracy"])) for x in members]
  x, (y, low, high) = statistics.band(curves)
  label = f"{name} ({len(members)} seeds)"
  axis.plot(x, y, color=colour, label=label, linewidth=2)
  if name in WITH_BAND:
    axis.fill_between(x, low, high, color=colour, alpha=0.15, lw=0)
band = patches.Patch(
  color="#343a40", alpha=0.15, label=f"95% interval of {', '.join(WITH_BAND)}"
)
handles, _ = axis.get_legend_handles_labels()
axis.legend(handles=[*handles, band], frameon=False, fontsize=9)
axis.set(
  xlabel="training seconds", ylabel="held-out accuracy (greedy)", xlim=(0, None)
)
axis.spines[["top", "right"]].set_visible(False)
plt.show()

# %% [markdown]
# Lines are means over seeds. With curves as noisy as these, one seed could have
# shown anything. So pair the seeds and take differences from `grpo`.

# %%
last = lambda name: {x["seed"]: x["accuracy"][-1] for x in runs_of(name)}
for name in COLOURS:
  if name != "grpo":
    gain = statistics.difference(last(name), last("grpo"))
    print(
      f"{name:18} greedy accuracy {np.mean([*last(name).values()]):.3f}, "
      f"minus grpo's {gain.value:+.3f} ({gain.low:+.3f} to {gain.high:+.3f})"
    )

# %% [markdown]
# Does training on fewer tokens cost accuracy? It depends on what is left out.
# Each dot is a seed.

# %%
KEPT = {
  "grpo": "every completion",
  "neyman": "neyman,\nautomatic budget",
  "neyman, an eighth": "neyman, an eighth\nof the completions",
  "grpo, half the prompts": "half of the prompts,\nuniformly at random",
}
figure, axis = plt.subplots(figsize=(7.5, 3.6), layout="constrained")
for place, name in enumerate(KEPT):
  members = runs_of(name)
  y = [line["accuracy"][-1] for line in members]
  axis.plot(np.full(len(y), place), y, "o", color="#2a6f97", alpha=0.6)
  axis.plot([place - 0.2, place + 0.2], [np.mean(y)] * 2, color="#343a40")
  tokens = np.mean([line["tokens_trained"] for line in members])
  axis.text(
    place, 0.98, f"{tokens / 1e6:.1f} M tokens", ha="center", fontsize=9
  )
dot = artists.Line2D([], [], color="#2a6f97", marker="o", ls="", label="a seed")
line = artists.Line2D([], [], color="#343a40", label="mean over seeds")
axis.legend(handles=[dot, line], frameon=False, fontsize=9, loc="lower left")
axis.set_xticks(range(len(KEPT)), KEPT.values())
axis.set(ylabel="greedy accuracy after the last step", ylim=(None, 1.0))
axis.spines[["top", "right"]].set_visible(False)
plt.show()

# %% [markdown]
# `neyman` reaches `grpo`'s accuracy on 0.5 or 0.9 of its 2.6 M tokens. Half of
# the prompts take more tokens than that, and end lower.

# %% [markdown]
# ## Runs of your own
#
# ```text
# python -m dppo_jax.main --config=configs/arithmetic.py:grpo --config.seed=1
# python -m dppo_jax.analysis.compare runs/arithmetic-*
# ```
#
# Give every method the same first weights (`--config.sft.from_run=DIR`) and the
# same seeds, at least three of them.
