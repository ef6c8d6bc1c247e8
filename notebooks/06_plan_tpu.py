# %% [markdown]
# # Planning a TPU run
#
# Will it fit? A laptop can answer that before a TPU is rented:
#
#     python -m dppo_jax.main --mode=plan --config=configs/qwen_math.py \
#       --topology=v5e:4x4
#
# No weights are initialised and no data is read: shapes are enough. If `libtpu`
# is installed, XLA also compiles the stages for chips that this machine lacks,
# and reports their memory. This notebook does the same from Python.

# %%
import copy
import os

os.environ["JAX_PLATFORMS"] = "cpu"

import importlib.util

import matplotlib.pyplot as plt
import numpy as np

from dppo_jax import config, plan, sharding
from dppo_jax.models import parameters
from dppo_jax.models.hf import families
from dppo_jax.planning import assumed, memory, targets
from dppo_jax.run import compile_cache

compile_cache.quiet_libraries()
GIB = 2**30

# %% [markdown]
# ## The models
#
# Some architectures are known by name, with the values of their checkpoints'
# `config.json`. For any other, a directory with its `config.json` is enough.

# %%
known = assumed.known_models()
for name, settings in known.items():
  count = parameters.num_parameters(families.from_settings(settings))
  print(f"{name:34} {count:>14,} parameters")

# %% [markdown]
# ## What a device holds
#
# A mesh has two axes that matter here. `data` divides prompts, decode slots and
# packed rows; `model` divides heads, feed-forward layers and the vocabulary.
# Weights and optimizer are divided over *both*: over `data` they are gathered
# layer by layer, where they are used. Every weight states the axes of its
# dimensions.

# %%
model = families.from_settings(known["Qwen/Qwen2.5-Math-1.5B"])
table = parameters.parameter_table(model)
for name in ("embed", "layers/q", "layers/gate", "layers/down", "final_norm"):
  param = table[name]
  places = [" x ".join(sharding.RULES[axis]) or "-" for axis in param.axes]
  print(f"{name:12} {param.shape!s:20} divided over {places}")

# %% [markdown]
# ## Does it fit?
#
# The state (weights and optimizer) is always in memory. A rollout adds the
# inference copy of the weights and the cache of keys and values of the slots
# that decode. An update adds the gradients, the activations of a micro-batch
# and some logits. The larger sum counts. Here are both for a run on 8 x 2
# devices:

# %%
c = config.Config()
config.use_method(c, "dppo")
c.model.hub_id, c.model.dtype = "Qwen/Qwen2.5-Math-1.5B", "bfloat16"
c.data.prompts_per_step, c.data.max_prompt_tokens = 128, 512
c.rollout.group_size, c.rollout.max_tokens = 8, 2048
c.pack.row_length, c.pack.rows_per_micro = 4096, 1
c.mesh.data, c.mesh.model = -1, 2  # all remaining devices, and two

estimate = plan.run(c, hardware="v5e:16")["estimated"]["v5e:16"]

# %%
COLOURS = ["#2a6f97", "#e09f3e"]
cases = [
  ("Qwen/Qwen3-0.6B", 4, 1),
  ("Qwen/Qwen2.5-Math-1.5B", 8, 1),
  ("Qwen/Qwen2.5-Math-1.5B", 16, 2),
  ("Qwen/Qwen3-4B", 16, 2),
  ("Qwen/Qwen3-4B", 16, 4),
  ("Qwen/Qwen3-8B", 16, 4),
]


def sums(hub_id, devices, model_axis):
  """GiB on one device by stage."""
  here = copy.deepcopy(c)
  here.model.hub_id, here.mesh.model = hub_id, model_axis
  mesh = assumed.abstract_mesh(here.mesh, devices)
  run = assumed.assumed_run(here, mesh, "tpu")
  stages = memory.estimate(run)
  return {stage: sum(x.values()) / GIB for stage, x in stages.items()}


rows = [sums(*case) for case in cases]
figure, axis = plt.subplots(figsize=(8.5, 4.4), layout="constrained")
for i, (stage, colour) in enumerate(zip(rows[0], COLOURS, strict=True)):
  place = np.arange(len(cases)) + 0.36 * (i - 0.5)
  sizes = [row[stage] for row in rows]
  axis.barh(place, sizes, height=0.34, color=colour, label=stage)
labels = [f"{name.split('/')[1]}, {n // m} x {m}" for name, n, m in cases]
axis.set_yticks(range(len(cases)), labels)
axis.invert_yaxis()
for kind in ("v5e", "v6e"):
  limit = targets.parse(f"{kind}:1").memory / GIB
  axis.axvline(limit, color="#343a40", linewidth=1, linestyle=":")
  axis.text(limit + 0.3, -0.6, kind, fontsize=9)
axis.set(xlabel="GiB on one device, 64 decode slots")
axis.legend(frameon=False, loc="lower right")
axis.spines[["top", "right"]].set_visible(False)
plt.show()

# %% [markdown]
# A dotted line is the memory of a chip. `data` helps most: weights, optimizer
# and gradients shrink with it. It does not divide the inference copy; `model`
# does. The cache depends on the slots of one device. If a run does not fit, the
# plan names the stage and its options:

# %%
big = copy.deepcopy(c)
big.model.hub_id = "Qwen/Qwen3-4B"
estimate = plan.run(big, hardware="v5e:16")

# %% [markdown]
# ## Compile without the chips
#
# `pip install "jax[tpu]"` works on a machine without a TPU and brings XLA's TPU
# compiler, which needs only the description of a chip. Below, two stages of a
# small model are compiled for four v5e chips; without `stages` all are. A real
# config takes about ten minutes on two cores. `h200:4` instead of `v5e:2x2`
# compiles for GPUs, with `pip install "jax[cuda13]"`.

# %%
small = config.Config()
config.use_method(small, "dppo")
small.model.shape |= {"embed": 256, "mlp": 512, "head_dim": 64}
small.model.dtype = "bfloat16"
small.data.train, small.data.eval = "arithmetic:64", ""
small.pack.row_length = 256  # the TPU kernel takes multiples of 128
small.mesh.data, small.mesh.model = 2, 2
if importlib.util.find_spec("libtpu"):
  stages = "to_inference_params,update"
  values = plan.run(small, topology="v5e:2x2", stages=stages)

# %% [markdown]
# `held` is the memory of a stage's arguments and results, `temporary` what it
# needs while it runs, `other` the rest of the state. If the largest sum exceeds
# the memory of a chip, you know it before the job waits in a queue.
#
# [Experiment 08](../experiments/08_plan/README.md) compiled the shipped configs
# for real slices, and the [configs' page](../configs/README.md) describes what
# grows with a pod and which limit comes first.
