# %% [markdown]
# # Planning a TPU run
#
# Will it fit? How long is a step, and what of it is waiting for memory or for
# the network? All of that can be asked on a laptop, before a TPU is paid for:
#
#     python -m dppo_jax.main --mode=plan --config=configs/qwen_math.py \
#       --topology=v5e:4x4
#
# No weights are made and no data is read here: shapes are enough. And where
# `libtpu` is installed, XLA compiles the stages for chips that are not there,
# and says what they take. This notebook does the same from Python.

# %%
import copy
import os

os.environ["JAX_PLATFORMS"] = "cpu"

import importlib.util

import matplotlib.pyplot as plt
import numpy as np

from dppo_jax import config, plan, sharding
from dppo_jax.models import transformer
from dppo_jax.models.hf import families
from dppo_jax.planning import (
  advice,
  architectures,
  assumed,
  hardware,
  memory_estimate,
  seconds,
  workload,
)
from dppo_jax.run import compile_cache

compile_cache.quiet_libraries()
GIB = 2**30

# %% [markdown]
# ## The models
#
# Their architectures are known by name, as their checkpoints' `config.json` has
# them. For any other, a directory with its `config.json` will do.

# %%
for name, settings in architectures.KNOWN.items():
  count = transformer.num_parameters(families.from_settings(settings))
  print(f"{name:34} {count:>14,} parameters")

# %% [markdown]
# ## What a device holds
#
# A mesh has two axes that matter here. `data` divides prompts, decode slots and
# packed rows; `model` divides heads, feed-forward layers and the vocabulary.
# Weights and optimizer are divided over *both*: over `data` they are gathered
# layer by layer, where they are used. Every weight says which of its dimensions
# goes where.

# %%
model = families.from_settings(architectures.KNOWN["Qwen/Qwen2.5-Math-1.5B"])
table = transformer.parameter_table(model)
for name in ("embed", "layers/q", "layers/gate", "layers/down", "final_norm"):
  param = table[name]
  places = [" x ".join(sharding.RULES[axis]) or "-" for axis in param.axes]
  print(f"{name:12} {param.shape!s:20} divided over {places}")

# %% [markdown]
# A run as far as shapes go, on 8 x 2 devices, none of which is there:

# %%
c = config.Config()
config.use_method(c, "dppo")
c.model.hub_id, c.model.dtype = "Qwen/Qwen2.5-Math-1.5B", "bfloat16"
c.data.prompts_per_step, c.data.max_prompt_tokens = 128, 512
c.rollout.group_size, c.rollout.max_tokens = 8, 2048
c.pack.row_length, c.pack.rows_per_micro = 4096, 1
c.mesh.data, c.mesh.model = -1, 2  # the rest, and two

mesh = assumed.abstract_mesh(c.mesh, 16)
run = assumed.assumed_run(c, mesh, "tpu")
print("mesh", sharding.describe(mesh))
for part, size in memory_estimate.resident(run).items():
  print(f"{part:10} {size / GIB:6.2f} GiB on each device, all the time")

# %% [markdown]
# ## Does it fit?
#
# On top of the state come, in a rollout, the copy of the weights that it reads
# and the cache of keys and values of the slots that decode; in an update the
# gradient, the activations of a micro-batch and some logits. What counts is the
# largest sum.

# %%
for moment, parts in memory_estimate.moments(run).items():
  largest = sorted(parts, key=parts.get)[-3:][::-1]
  words = ", ".join(f"{x} {parts[x] / GIB:.1f}" for x in largest)
  print(f"{moment:19} {sum(parts.values()) / GIB:5.1f} GiB: {words}, ...")

# %%
COLOURS = ["#2a6f97", "#9e2a2b", "#e09f3e"]
cases = [
  ("Qwen/Qwen3-0.6B", 4, 1),
  ("Qwen/Qwen2.5-Math-1.5B", 8, 1),
  ("Qwen/Qwen2.5-Math-1.5B", 16, 2),
  ("Qwen/Qwen3-4B", 16, 2),
  ("Qwen/Qwen3-4B", 16, 4),
  ("Qwen/Qwen3-8B", 16, 4),
]


def sums(hub_id, devices, model_axis):
  """GiB of a device by moment."""
  here = copy.deepcopy(c)
  here.model.hub_id, here.mesh.model = hub_id, model_axis
  found = advice.sums(here, hardware.Hardware("v5e", devices))
  return {moment: size / GIB for moment, size in found.items()}


rows = [sums(*case) for case in cases]
figure, axis = plt.subplots(figsize=(8.5, 4.4), layout="constrained")
for i, (moment, colour) in enumerate(zip(rows[0], COLOURS, strict=True)):
  place = np.arange(len(cases)) + 0.27 * (i - 1)
  sizes = [row[moment] for row in rows]
  axis.barh(place, sizes, height=0.25, color=colour, label=moment)
labels = [f"{name.split('/')[1]}, {n // m} x {m}" for name, n, m in cases]
axis.set_yticks(range(len(cases)), labels)
axis.invert_yaxis()
for kind in ("v5e", "v6e"):
  limit = hardware.Hardware(kind, 1).memory / GIB
  axis.axvline(limit, color="#343a40", linewidth=1, linestyle=":")
  axis.text(limit + 0.3, -0.6, kind, fontsize=9)
axis.set(xlabel="GiB on one device, 64 decode slots")
axis.legend(frameon=False, loc="lower right")
axis.spines[["top", "right"]].set_visible(False)
plt.show()

# %% [markdown]
# A dotted line is the memory of a chip. `data` does most: weights, optimizer
# and gradient shrink with it. The rollout's copy does not, `model` divides it
# (and `rollout.shard_weights` over `data` too, at the price of gathering every
# layer for every token). The cache is what the slots of one device need. What
# does not fit comes with the smallest change that would:

# %%
big = copy.deepcopy(c)
big.model.hub_id = "Qwen/Qwen3-4B"
place = hardware.parse("v5e:16")
print(advice.find(big, place))

# %% [markdown]
# ## How long might a step take?
#
# That depends on lengths and on what the method leaves, neither of which anyone
# knows before a run. So they are stated: here completions of 700 tokens, of
# 2,048 at most, and a quarter of the prompts always right or always wrong. What
# a method then keeps is tried out on groups that are made up.

# %%
given = workload.parse("prompt=150,completion=700,zero_variance=0.25")
chip = hardware.CHIPS["v5e"]
for method in ("grpo", "dppo", "neyman"):
  here = copy.deepcopy(c)
  config.use_method(here, method)
  if method == "neyman":  # its shares would set themselves
    budgets = {"prompt_budget": 0.75, "completion_budget": 0.25}
    here.method.args |= budgets
  run = assumed.assumed_run(here, mesh, "tpu")
  work = workload.of_step(run, given)
  phases = seconds.phases(run, work, chip, given)
  words = [f"{name} {x.seconds:.1f} ({x.bound})" for name, x in phases.items()]
  kept = work.shares
  print(
    f"{method}: {kept.prompts:.0%} of prompts, {kept.completions:.0%} of their "
    f"completions: {seconds.total(phases):.1f} s"
  )
  print("  " + ", ".join(words[1:]))

# %% [markdown]
# Decoding waits for memory: for weights and caches, at every token. The update
# computes. Pruning completions shortens the update, pruning prompts both, and
# more decode slots make the decoding of as many tokens cheaper, if they fit.
#
# ## Compile for chips that are not there
#
# With `pip install "jax[tpu]"`, which works on a machine without a TPU, XLA's
# TPU compiler is here. It needs no chip, only a description of one. Below, two
# stages of a small model are compiled for four v5e chips; without `--stages`
# all are. A real config takes it some ten minutes on two cores.

# %%
has_compiler = importlib.util.find_spec("libtpu") is not None
small = config.Config()
config.use_method(small, "dppo")
small.model.embed, small.model.mlp, small.model.head_dim = 256, 512, 64
small.model.dtype = "bfloat16"
small.data.train, small.data.eval = "arithmetic:64", ""
small.pack.row_length = 256  # the TPU kernel takes multiples of 128
small.mesh.data, small.mesh.model = 2, 2
stages = "to_inference_params,update"
found = plan.run(small, shape="v5e:2x2", stages=stages)

# %%
if has_compiler:
  for name, stage in found["compiled"]["stages"].items():
    print(name, stage["kernels"], f"{stage['seconds']:.0f} s to compile")

# %% [markdown]
# `held` is what a stage is given and returns, `temporary` what it needs while
# it runs, `beside` what else is in memory meanwhile. If the largest sum exceeds
# the memory of a chip, you know it now, not after an hour in a queue.
#
# [Experiment 08](../experiments/08_plan/README.md) has the shipped configs
# compiled for real slices, and the
# [configs' page](../configs/README.md) what grows with a pod and what breaks
# first.
