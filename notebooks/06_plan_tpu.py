# %% [markdown]
# # Planning a TPU run
#
# Will it fit? How many tokens is a step? Which kernels will it use? All of that
# can be known on a laptop, before a TPU is paid for. No weights are made here:
# shapes are enough. And where `libtpu` is installed, XLA compiles the stages
# for chips that are not there, and says what they take.

# %%
import math
import os

os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # this machine is no TPU
os.environ["JAX_PLATFORMS"] = "cpu"

import importlib.util

import jax
from jax.experimental import topologies
import matplotlib.pyplot as plt
import numpy as np

from dppo_jax import compiled, config, setup_run, sharding
from dppo_jax.models import kv_cache, transformer
from dppo_jax.reporting import logs

jax.config.update("jax_num_cpu_devices", 4)  # pretended
logs.quiet_libraries()
GIB = 2**30

# %% [markdown]
# ## The models
#
# Three shapes, as their checkpoints' `config.json` has them.

# %%
QWEN2 = {"has_qkv_bias": True, "family": "Qwen2ForCausalLM"}
QWEN3 = {"has_qk_norm": True, "family": "Qwen3ForCausalLM"}
SHAPES = {
  "Qwen3-0.6B": (151936, 1024, 28, 16, 8, 128, 3072, QWEN3),
  "Qwen2.5-Math-1.5B": (151936, 1536, 28, 12, 2, 128, 8960, QWEN2),
  "Qwen2.5-Math-7B": (
    152064,
    3584,
    28,
    28,
    4,
    128,
    18944,
    QWEN2 | {"is_tied": False},
  ),
}
MODELS = {
  name: transformer.ModelConfig(*numbers, dtype="bfloat16", **rest)
  for name, (*numbers, rest) in SHAPES.items()
}
for name, model in MODELS.items():
  print(f"{name:18} {transformer.num_parameters(model):>13,} parameters")

# %% [markdown]
# ## What a device holds
#
# A mesh has two axes. `data` divides prompts, decode slots and packed rows;
# `model` divides heads, feed-forward layers and the vocabulary. Weights and
# optimizer are divided over *both*: over `data` they are gathered layer by
# layer, where they are used.
#
# Every weight says which of its dimensions goes where.

# %%
table = transformer.parameter_table(MODELS["Qwen2.5-Math-1.5B"])
for name in ("embed", "layers/q", "layers/gate", "layers/down", "final_norm"):
  param = table[name]
  places = [sharding.RULES[axis] for axis in param.axes]
  print(f"{name:12} {param.shape!s:20} divided over {places}")


# %%
def held(model, data, model_axis, is_for_rollout=False):
  """Weights that one device of a `data x model_axis` mesh holds."""
  mesh = {"data": data, "model": model_axis, None: 1}
  total = 0
  for param in transformer.parameter_table(model).values():
    size = 1
    for length, axis in zip(param.shape, param.axes, strict=True):
      place = sharding.RULES[axis]
      if is_for_rollout and place == "data":
        place = None  # a rollout gathers nothing: each device has them all
      size *= math.ceil(length / mesh[place])
    total += size
  return total


for name, model in MODELS.items():
  shares = [held(model, data, 1) for data in (1, 4, 16)]
  print(f"{name:18}", *(f"{x:>13,}" for x in shares), " on 1, 4, 16 devices")

# %% [markdown]
# Is that what the program does? Ask it: the train state of a run, as shapes and
# shardings, on four pretended devices. The model is the 1.5B one. Nothing is
# allocated.

# %%
c = config.Config()
config.use_method(c, "dppo")
c.data.num_arithmetic = 64
c.mesh.data, c.mesh.model = 2, 2
run = setup_run.setup_run(c)
run = run._replace(model=MODELS["Qwen2.5-Math-1.5B"])
state = compiled.abstract_train_state(run)


def bytes_on_one_device(tree):
  return sum(
    math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
    for x in jax.tree.leaves(tree)
  )


weights = bytes_on_one_device(state.params)
adam = bytes_on_one_device(state.opt_state)
print(f"weights {weights / GIB:.2f} GiB a device, optimizer {adam / GIB:.2f}")
assert weights == 4 * held(run.model, 2, 2)

# %% [markdown]
# ## Does it fit?
#
# On top of the state come
#
# - the gradient, float32, as large as the weights;
# - the copy of the weights that a rollout reads, in bfloat16, divided over
#   `model` only;
# - the cache of keys and values of the slots that decode.
#
# The activations of a micro-batch and the logits come on top of that: a
# compiler can tell, a formula only roughly. Leave a fifth free.


# %%
def cache_bytes(model, slots, positions):
  """Keys and values of `slots` completions of `positions` tokens."""
  cache = jax.eval_shape(lambda: kv_cache.init(model, slots, [positions]))
  return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache))


def plan(model, data, model_axis, slots=64, positions=2560):
  """GiB on one device, by what it is for."""
  divided = held(model, data, model_axis)
  parts = {
    "weights": 4 * divided,
    "AdamW": 8 * divided,
    "gradient": 4 * divided,
    "rollout copy": 2 * held(model, data, model_axis, is_for_rollout=True),
    "cache": cache_bytes(model, slots, positions) / model_axis,
  }
  return {name: size / GIB for name, size in parts.items()}


# Memory of a chip; from cloud.google.com/tpu/docs, a page for each.
CHIPS = {"v5e": 16, "v6e": 32, "v5p": 95}
MESHES = [(1, 1), (4, 1), (8, 1), (4, 4), (16, 4)]

for name, model in MODELS.items():
  print(name)
  for data, axis in MESHES:
    if model.kv_heads % axis:
      print(f"  {data:2} x {axis}: {model.kv_heads} key heads do not divide")
      continue
    total = sum(plan(model, data, axis).values())
    fits = [chip for chip, gib in CHIPS.items() if total < 0.8 * gib]
    print(f"  {data:2} x {axis}: {total:6.1f} GiB a device, fits", *fits)

# %%
COLOURS = ["#2a6f97", "#89c2d9", "#9aa5b1", "#e09f3e", "#9e2a2b"]
cases = [
  (name, mesh)
  for name, model in MODELS.items()
  for mesh in MESHES
  if model.kv_heads % mesh[1] == 0
]
figure, axis = plt.subplots(figsize=(8.5, 4.8), layout="constrained")
left = np.zeros(len(cases))
rows = [plan(MODELS[name], *mesh) for name, mesh in cases]
for part, colour in zip(rows[0], COLOURS, strict=True):
  sizes = np.array([row[part] for row in rows])
  axis.barh(range(len(cases)), sizes, left=left, color=colour, label=part)
  left += sizes
labels = [f"{name}, {data} x {model}" for name, (data, model) in cases]
axis.set_yticks(range(len(cases)), labels)
axis.invert_yaxis()
for chip, gib in CHIPS.items():
  axis.axvline(gib, color="#343a40", linewidth=1, linestyle=":")
  axis.text(gib + 0.7, -0.75, chip, fontsize=9)
for place, total in enumerate(left):
  axis.text(
    min(total, 98) + 0.7, place, f"{total:.0f}", va="center", fontsize=8
  )
axis.set(xlim=(0, 103), xlabel="GiB on one device; a bar may end beyond")
axis.legend(frameon=False, loc="upper right", bbox_to_anchor=(0.9, 0.93))
axis.spines[["top", "right"]].set_visible(False)
plt.show()

# %% [markdown]
# A dotted line is the memory of a chip. `data` does most: weights, optimizer
# and gradient shrink with it. The rollout copy does not, and `model` divides
# it. The cache is what the slots of one device need: fewer slots, less cache.
#
# ## Batch arithmetic
#
# A config says what a step is. `description()` does the sums. Slots and rows
# are counted for one device, so a larger mesh takes more at once and fewer
# turns. Here the default config, and the same on 2 x 2 devices:

# %%
c = config.Config()
config.use_method(c, "dppo")
c.data.num_arithmetic = 64
for c.mesh.data, c.mesh.model in ((1, 1), (2, 2)):
  lines = setup_run.setup_run(c).description().split("\n")
  print("\n".join(x for x in lines if x.startswith(("step", "update", "  "))))
  print()

# %% [markdown]
# ## How long might it take?
#
# A forward pass takes about 2 operations for each parameter and token, training
# 6, and 8 where activations are recomputed. So a rollout of `k` tokens takes at
# least `2k` per parameter, an update on `m` of them `8m`. Decoding is bound by
# reading weights and cache, not by arithmetic, and is slower than this: take it
# as a floor.

# %%
PEAK = {"v5e": 197e12, "v6e": 918e12, "v5p": 459e12}  # bf16, of one chip


def floor_seconds(model, tokens, trained, chips, chip="v5e", used=0.4):
  """Seconds of a step if `used` of the peak is reached throughout."""
  operations = transformer.num_parameters(model) * (2 * tokens + 8 * trained)
  return operations / (chips * PEAK[chip] * used)


tokens = 128 * 8 * 700  # prompts x completions x tokens of one
for kept in (1.0, 0.5, 0.25):
  seconds = floor_seconds(
    MODELS["Qwen2.5-Math-1.5B"], tokens, kept * tokens, chips=8
  )
  print(f"1.5B on 8 v5e, {kept:4.0%} of the tokens trained: {seconds:5.1f} s")

# %% [markdown]
# The update is most of it, which is why pruning completions pays.
#
# ## Compile for chips that are not there
#
# With `pip install "jax[tpu]"`, which works on a machine without a TPU, XLA's
# TPU compiler is here. It needs no chip, only a description of one. Below, a
# small model is compiled for four v5e chips.

# %%
has_compiler = importlib.util.find_spec("libtpu") is not None
print("libtpu is", "here" if has_compiler else "not installed: skipping")

# %%
if has_compiler:
  c = config.Config()
  config.use_method(c, "dppo")
  c.model.embed, c.model.mlp, c.model.head_dim = 256, 512, 64
  c.model.dtype = "bfloat16"
  c.data.num_arithmetic, c.data.eval = 64, ""
  c.pack.row_length = 256  # the TPU kernel takes multiples of 128
  c.mesh.data, c.mesh.model = 2, 2

  devices = topologies.get_topology_desc(
    platform="tpu", topology_name="v5e:2x2"
  ).devices
  mesh = sharding.make_mesh(data=2, model=2, devices=devices)
  run = setup_run.setup_run(c, mesh)
  print(devices[0].device_kind, "attention by", run.model.attention)
  with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
    stages = compiled.compile_step(run)

# %%
if has_compiler:
  print(f"{'stage':>19}   held MiB  temporary MiB  custom kernels")
  for name, stage in stages._asdict().items():
    if not hasattr(stage, "memory_analysis"):
      continue
    used = stage.memory_analysis()
    size = used.argument_size_in_bytes + used.output_size_in_bytes
    size -= used.alias_size_in_bytes  # what is donated is reused
    kernels = stage.as_text().count('"tpu_custom_call"')
    print(
      f"{name:>19} {size / 2**20:10.2f} {used.temp_size_in_bytes / 2**20:14.2f}"
      f" {kernels:8}"
    )

# %% [markdown]
# `held` is what a stage is given and returns, `temporary` what it needs while
# it runs: activations, logits, and weights that were gathered. If the largest
# sum exceeds the memory of a chip, you know it now, not after an hour in a
# queue. Then raise `mesh.data`, lower `rollout.num_slots` or
# `pack.rows_per_micro`, or take `model.remat=layers`.
#
# For any config, on all chips of a slice, see
# [`experiments/04_speed/plan.py`](../experiments/04_speed/plan.py).
