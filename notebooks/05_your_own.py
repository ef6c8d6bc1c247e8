# %% [markdown]
# # Your own reward, data, rule and objective
#
# Everything a run is made of can be a function of yours. None of it goes into
# the package. Here a tiny model learns sums on a clock of five hours, where
# 3 + 4 is 2:
#
# ```
# 3+4+2+1=   →   3+4=2;2+2=4;4+1=0;\boxed{0}
# ```
#
# with problems, a reward, a way to choose completions and a loss that are all
# defined below. Each is a dozen lines.

# %%
import json
import pathlib
import runpy
import tempfile

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt

from dppo_jax import algo, config, methods, rewards, train
from dppo_jax.analysis import runs
from dppo_jax.records import Groups, Selection

folder = pathlib.Path(tempfile.mkdtemp())

# %% [markdown]
# ## Data: a function
#
# A data source is a function that yields dictionaries, or a `.jsonl` or
# `.parquet` file, or a TFDS data set. It needs a `problem` and an `answer`. A
# `solution` is optional: supervised steps imitate it. Every other column
# reaches your reward functions by its name.
#
# ## Reward: a function
#
# A reward function is TRL's: lists in, a number for each completion out. It
# takes what it names: `completions`, `answers`, `prompts`, any column.
#
# Rewards run in separate processes: a function that hangs or crashes costs one
# reward and not the run. A process must be able to import them. So both go
# into a file, and the config names them as `FILE.py:FUNCTION`.

# %%
mine = folder / "mine.py"
mine.write_text(r'''
import random


def problem(generator):
  digits = generator.choices(range(5), k=4)
  hour, steps = digits[0], []
  for digit in digits[1:]:
    steps.append(f"{hour}+{digit}={(hour + digit) % 5}")
    hour = (hour + digit) % 5
  work = ";".join(steps)
  solution = rf"{work};\boxed{{{hour}}}"
  if generator.random() < 0.6:
    solution = rf"\boxed{{{generator.randrange(5)}}}"  # a guess
  return {
    "problem": "+".join(map(str, digits)) + "=",
    "answer": str(hour),
    "solution": solution,
    "work": work,
  }


def every_problem():
  """600 different ones."""
  generator, problems = random.Random(0), {}
  while len(problems) < 600:
    new = problem(generator)
    problems[new["problem"]] = new
  return list(problems.values())


def training():
  """The problems to train on."""
  return every_problem()[64:]


def shown(completions, work):
  """Share of the right steps that a completion shows."""
  fractions = []
  for text, steps in zip(completions, work):
    steps = steps.split(";")
    fractions.append(sum(step in text for step in steps) / len(steps))
  return fractions
''')
print(mine.name, "holds", len(mine.read_text().splitlines()), "lines")

# %% [markdown]
# The same as a file of JSON lines, for evaluation. These problems are not
# trained on.

# %%
held_out = folder / "held_out.jsonl"
problems = runpy.run_path(str(mine))["every_problem"]()[:64]
held_out.write_text("".join(json.dumps(line) + "\n" for line in problems))
print(*held_out.read_text().splitlines()[:2], sep="\n")

# %% [markdown]
# Rewards are added up with their weights. The first one is the verifier: what
# it says is the accuracy. Try them before you train.

# %%
functions = f"exact,{mine}:shown:0.2"
texts = [
  r"3+4=2;2+2=4;4+1=0;\boxed{0}",
  r"\boxed{0}",
  r"3+4=2;2+2=3;3+1=4;\boxed{4}",
  r"3+4=2;2+2=4;4+",
]
with rewards.Grader(functions, num_workers=1) as grader:
  graded = grader.grade(
    ["3+4+2+1="] * 4, texts, ["0"] * 4, {"work": ["3+4=2;2+2=4;4+1=0"] * 4}
  )
for text, reward, correct in zip(
  texts, graded.rewards, graded.correct, strict=True
):
  print(f"{text:28} reward {reward:.2f}  correct {correct:.0f}")

# %% [markdown]
# ## Method: which completions to train on
#
# A method is a function with options that returns a `Method`. This one keeps
# the best and the worst of each group, and a fraction of the others. The rule
# returns the probability of each completion to be kept. The weights come from
# these probabilities and make the gradient unbiased.


# %%
def ends(keep: float = 0.25) -> methods.Method:
  """Keeps the best and worst of each group, and a fraction of the others."""

  def rule(rng, groups, budget):
    a = groups.advantages
    is_best = a == a.max(axis=1, keepdims=True)
    is_worst = a == a.min(axis=1, keepdims=True)
    prob = jnp.where(is_best | is_worst, 1.0, keep)
    return Selection(algo.bernoulli(rng.key, prob), prob)

  return methods.grpo()._replace(completions=rule)


# %% [markdown]
# ## Objective: the loss of a token
#
# An objective has a loss of (ratio, advantage, log-probability), token by
# token. It also says which tokens were clipped, for the log. Ours lets a ratio
# count up to a bound, for either sign of the advantage.


# %%
def bounded(most: float = 2.0) -> algo.Objective:
  """A ratio above `most` stops counting."""

  def token_loss(ratio, advantages, logprobs):
    return -jnp.minimum(ratio, most) * advantages, ratio > most

  return algo.grpo()._replace(token_loss=token_loss)


# %% [markdown]
# Both are pure functions, so they can be tried on a few numbers.

# %%
rewards_of_two = jnp.array([[1.5, 0.25, 0.25, 0.0], [0.5, 1.5, 0.0, 0.25]])
advantages = algo.group_normalized(rewards_of_two)
groups = Groups(rewards_of_two, advantages, jnp.full((2, 4), 5))


class Rng:
  key = jax.random.key(0)


chosen = ends().completions(Rng, groups, 1.0)
print("advantages\n", advantages.round(2))
print("probabilities\n", chosen.prob)
print("weights of what was kept\n", algo.horvitz_thompson(chosen))

ratio = jnp.array([0.5, 1.0, 3.0])
print("loss of three tokens:", *bounded().token_loss(ratio, 1.0, None))

# %% [markdown]
# ## A run
#
# The config puts it together. A short supervised phase gives the model a start:
# it can show its work, but mostly guesses, as six in ten of the solutions that
# it imitates do. Two updates on each rollout make ratios other than 1, so that
# the objective has something to do.

# %%
c = config.Config()
config.use_method(c, ends, bounded)
c.method.args["keep"] = 0.3
c.reward.functions = functions
c.data.train = f"{mine}:training"
c.data.eval = str(held_out)
c.data.prompts_per_step = 16
c.rollout.group_size = 8
c.rollout.max_tokens = 24
c.rollout.num_slots = 128
c.model.remat = "none"
c.pack.row_length = 64
c.pack.rows_per_micro = 8
c.objective.inner_updates = 2
c.optimizer.learning_rate = 2e-5
c.sft.steps = 300
c.steps = 30
c.eval.every = 3
c.eval.samples = 4
print(c.method.name, c.method.args, "|", c.objective.name, c.objective.args)

# %%
train.run(c, folder / "run")

# %% [markdown]
# With more `steps`, the same call resumes from the checkpoint. From a shell,
# with the two functions above in a file:
#
# ```text
# python -m dppo_jax.main --config=FILE.py:mine.py:ends,mine.py:bounded
# ```
#
# ## What it learned

# %%
run = runs.load(folder / "run")
steps = [line["step"] for line in run.steps]
reward = [line["reward/mean"] for line in run.steps]
figure, axis = plt.subplots(figsize=(6.5, 3.8), layout="constrained")
axis.plot(steps, reward, color="#9aa5b1", label="reward of a completion, mean")
axis.plot(
  [line["step"] for line in run.evals],
  [line["eval/accuracy"] for line in run.evals],
  "o-",
  color="#9e2a2b",
  label="sampled accuracy on held-out problems",
)
axis.set(xlabel="step", ylim=(0, None))
axis.legend(frameon=False)
axis.spines[["top", "right"]].set_visible(False)
plt.show()

# %% [markdown]
# ## Samples
#
# `samples.jsonl` in the run's folder keeps completions of every step: what was
# written, what it earned, and what became of it.

# %%
lines = (folder / "run" / "samples.jsonl").read_text().splitlines()
samples = [json.loads(line) for line in lines]
print(f"{len(samples)} samples; of each:", *samples[-1])
print()
for split, step in (("train", 1), ("train", c.steps), ("eval", c.steps)):
  print(f"{split}, step {step}")
  some = [x for x in samples if x["split"] == split and x["step"] == step]
  for x in some[:6]:
    print(f"  {x['problem']} {x['completion']:26} reward {x['reward']:.2f}")

# %% [markdown]
# ## Where this is in the code
#
# - [`rewards`](../dppo_jax/rewards), [`data`](../dppo_jax/data): what functions
#   and files may look like.
# - [`methods`](../dppo_jax/methods): every method is a function such as `ends`.
# - [`algo/objectives.py`](../dppo_jax/algo/objectives.py): objectives, such as
#   `bounded`.
