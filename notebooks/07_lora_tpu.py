# %% [markdown]
# # Qwen3-0.6B with LoRA on GSM8K, on one or eight TPU v5e
#
# Colab lends one v5e chip, Kaggle a slice of eight. On either this notebook
# trains adapters of Qwen3-0.6B on grade-school problems. On any other machine
# it runs the same cells with a model of 0.1 M parameters and sums of small
# numbers, in two minutes.
#
# **It has never been run on a TPU.** Memory and seconds below are predictions.
# XLA's TPU compiler, which needs no TPU, compiled this config: for `v5e:2x4` it
# takes 5.6 GiB on each chip in the rollout and 1.4 in the update, of 15.7; for
# `v5e:1x1`, with 128 slots, 13.5 and 4.2. On eight chips Qwen3-4B fits with
# LoRA too, with 11.5 and 5.7 GiB, and not without it
# ([experiment 14](../experiments/14_lora/README.md)).

# %%
import json
import pathlib
import tempfile

from dppo_jax.configs import arithmetic, gsm8k
import jax
import matplotlib.pyplot as plt

from dppo_jax import export, plan, train
from dppo_jax.analysis import runs
from dppo_jax.models.hf import families
from dppo_jax.planning import assumed

is_full_size = jax.default_backend() == "tpu"
num_chips = jax.device_count() if is_full_size else 8  # to plan for
folder = pathlib.Path(tempfile.mkdtemp())
print(f"{jax.device_count()} x {jax.devices()[0].device_kind}")

# %% [markdown]
# ## The config
#
# `lora.rank` is all that LoRA needs: weights are frozen in bfloat16, and
# adapters of every linear layer are trained with AdamW in float32. They learn
# with five to ten times the rate of full training.


# %%
def full_size():
  c = gsm8k.get_config("neyman")
  c.lora.rank = 16
  c.optimizer.learning_rate = 1e-5
  c.steps = 200 if num_chips == 8 else 50  # a chip takes eight times as long
  return c


def toy():
  c = arithmetic.get_config("neyman")
  c.lora.rank = 8
  c.optimizer.learning_rate = 1e-4
  c.sft.steps = 1200  # makes the model that is then frozen
  c.steps = 60
  c.eval.every = 5
  c.log.writers = ""
  return c


c = full_size() if is_full_size else toy()

# %% [markdown]
# ## Will it fit?
#
# The estimate needs neither weights nor chips. Without LoRA the weights, their
# gradients and AdamW take five times the memory:

# %%
for rank in (0, 16):
  planned = full_size()
  planned.lora.rank = rank
  plan.run(planned, hardware=f"v5e:{num_chips}")

# %% [markdown]
# `pip install "jax[tpu]"` brings the compiler, and this compiles what the
# estimate only adds up. It takes minutes, so it is off here:
#
# ```python
# topology = "v5e:2x4"  # or "v5e:1x1"
# plan.run(full_size(), topology=topology, stages="roll_out,update")
# ```
#
# ## How long is a step?
#
# A prediction from two facts of a chip: 197 TFLOP/s in bfloat16 and 819 GB/s
# of memory ([cloud.google.com](https://cloud.google.com/tpu/docs/v5e)). Each
# decode step reads the weights and the cache of its slots; an update takes 8
# FLOPs per parameter and token, with the forward pass computed twice. Half of
# either peak is assumed.

# %%
FLOPS, BANDWIDTH, EFFICIENCY = 197e12, 819e9, 0.5
big = full_size()
model = families.from_settings(assumed.known_models()[big.model.hub_id])
length = 300  # tokens of a completion
completions = big.data.prompts_per_step * big.rollout.group_size
parameters = 0.6e9
cache = 2 * 2 * model.layers * model.kv_heads * model.head_dim  # bytes a token
slots = 64 if num_chips == 8 else 128  # as planned above
rounds = completions / num_chips / slots
read = 2 * parameters + slots * cache * (100 + length / 2)
rollout = rounds * length * read / BANDWIDTH / EFFICIENCY
tokens = completions * (100 + length) / num_chips
update = 8 * parameters * tokens / FLOPS / EFFICIENCY
print(
  f"{completions} completions of {length} tokens: {rollout:.1f} s of rollout, "
  f"{update:.1f} s of update; {big.steps} steps in "
  f"{big.steps * (rollout + update) / 60:.0f} minutes, evaluations excluded"
)

# %% [markdown]
# ## Train
#
# The same command resumes: after a disconnect, run the cell again, with a
# `workdir` that outlives the machine.

# %%
workdir = folder / "run"
train.run(c, workdir)

# %%
run = runs.load(workdir)
seconds, accuracy = run.curve("step/seconds")
figure, axis = plt.subplots(figsize=(7, 3.2), layout="constrained")
axis.plot(seconds, accuracy, color="#2a6f97", marker="o", markersize=3)
axis.set(
  xlabel="seconds of training",
  ylabel="held-out accuracy (sampled)",
  ylim=(0, 1),
)
axis.spines[["top", "right"]].set_visible(False)
plt.show()

# %% [markdown]
# ## Take it home
#
# `format="adapter"` writes the adapter alone, a few MB, in PEFT's format;
# without it the merged weights are written, as a checkpoint for transformers
# and vLLM.

# %%
export.run(c, workdir, folder / "adapter", format="adapter")
for path in sorted((folder / "adapter").iterdir()):
  print(f"{path.name:28}{path.stat().st_size:>10,} bytes")
settings = json.loads((folder / "adapter/adapter_config.json").read_text())
print({k: settings[k] for k in ("r", "lora_alpha", "target_modules")})
