# %% [markdown]
# # A pretrained chat model learns to calculate
#
# SmolLM2-135M-Instruct, with its own tokenizer and chat template and without
# supervised fine-tuning, learns sums, differences, products and one-step word
# problems of single digits. The reward reads the last number of a completion.
# The accuracy that training optimises is that of *sampled* completions; it is
# measured on 75 problems that are not trained on.
#
# The weights, 270 MB, come from the Hugging Face hub. The 40 steps take eight
# minutes on two CPU cores and 6 GB of memory; Colab's machine without an
# accelerator has two. It has not been run on a GPU or TPU.

# %%
import json
import pathlib
import tempfile

from dppo_jax.configs import smollm2
import jax
import matplotlib.pyplot as plt

from dppo_jax import sample, train
from dppo_jax.analysis import runs

folder = pathlib.Path(tempfile.mkdtemp())
print(f"{jax.device_count()} x {jax.devices()[0].device_kind}")

# %%
c = smollm2.get_config("dppo")
c.steps = 40  # configs/smollm2.py takes 60
c.eval.every = 10
c.log.writers = ""
# Where there is no hub: python experiments/15_real_model/fetch.py smollm2
cached = pathlib.Path.home() / ".cache/dppo_jax/models/smollm2"
if cached.exists():
  c.model.hub_id, c.model.path = "", str(cached)
problems = list(smollm2.single())
print(f"{len(problems)} problems to train on, such as")
for row in problems[:4]:
  print(f"  {row['problem']}  ->  {row['answer']}")

# %% [markdown]
# ## Before
#
# Two completions are sampled for each prompt. Before the first step there is no
# checkpoint, so that `sample` reads the pretrained weights.

# %%
workdir = folder / "run"
questions = folder / "questions.txt"
questions.write_text(
  "What is 7 x 6? Answer with a number.\n"
  "Ann has 2 pens and buys 8 more. How many pens does Ann have now?\n"
)
sample.run(c, workdir, prompt=f"@{questions}")

# %% [markdown]
# ## Train
#
# The same call resumes a run that was interrupted.

# %%
train.run(c, workdir)

# %% [markdown]
# ## After

# %%
sample.run(c, workdir, prompt=f"@{questions}")

# %%
run = runs.load(workdir)
steps = [x["step"] for x in run.evals]
figure, (left, right) = plt.subplots(
  1, 2, figsize=(9, 3.2), layout="constrained"
)
left.fill_between(
  steps,
  [x["eval/accuracy_low"] for x in run.evals],
  [x["eval/accuracy_high"] for x in run.evals],
  color="#2a6f97",
  alpha=0.2,
  linewidth=0,
)
left.plot(steps, [x["eval/accuracy"] for x in run.evals], "o-", color="#2a6f97")
left.set(xlabel="step", ylabel="held-out accuracy (sampled, 95%)", ylim=(0, 1))
right.plot(
  [x["step"] for x in run.steps],
  [x["tokens/completion_mean"] for x in run.steps],
  color="#2a6f97",
)
right.set(xlabel="step", ylabel="tokens of a completion")
for axis in (left, right):
  axis.spines[["top", "right"]].set_visible(False)
plt.show()

# %% [markdown]
# Completions become shorter as the model learns to stop after its answer. Some
# of each step are in `samples.jsonl`:

# %%
with open(workdir / "samples.jsonl") as file:
  rows = [json.loads(line) for line in file]
for row in (rows[0], rows[-1]):
  print(f"step {row['step']}: {row['problem']}\n  {row['completion']!r}\n")

# %% [markdown]
# ## And my model?
#
# `--config.model.hub_id` takes any Llama, Qwen or Gemma 3 of the hub, and
# `--config.data.train` your problems: see the
# [data page](../dppo_jax/data/README.md). Ten steps with `neyman` print the
# speed-up that pruning has on your model, data and machine. The same model is
# compared with TRL, and methods with each other, in
# [experiment 15](../experiments/15_real_model/README.md).
