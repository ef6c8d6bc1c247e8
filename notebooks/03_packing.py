# %% [markdown]
# # Packing, drawn
#
# Completions differ in length. A batch that pads them all to the longest one
# computes mostly padding. Packing lays them side by side in rows instead.
#
# You will see the rows, how completions of one prompt share its tokens, and the
# attention mask that keeps neighbours apart. At the end a model reads the rows
# and gives every completion the numbers it gets alone.

# %%
import jax
import jax.numpy as jnp
from matplotlib import colors, patches
import matplotlib.pyplot as plt
import numpy as np

from dppo_jax.algo import filling, packing
from dppo_jax.models import parameters, transformer
from dppo_jax.models.config import ModelConfig
from dppo_jax.records import PromptBatch, Rollout, Selection

# %% [markdown]
# ## A small rollout
#
# `Q` = 3 prompts with `G` = 4 completions each. The tokens are random numbers.
# Only the lengths matter here.

# %%
Q, G, P, T = 3, 4, 10, 24
rng = np.random.default_rng(0)
prompts = PromptBatch(
  ids=jnp.arange(Q),
  tokens=jnp.array(rng.integers(2, 32, (Q, P)), jnp.int32),
  lengths=jnp.array([6, 10, 8], jnp.int32),
)
lengths = jnp.array([[5, 24, 9, 12], [7, 6, 16, 8], [11, 20, 4, 10]], jnp.int32)
rollout = Rollout(
  prompt_ids=prompts.ids,
  tokens=jnp.array(rng.integers(2, 32, (Q, G, T)), jnp.int32),
  logprobs=jnp.zeros((Q, G, T)),
  lengths=lengths,
  is_stopped=jnp.ones((Q, G), bool),
  kept=Selection(keep=jnp.ones(Q, bool), prob=jnp.ones(Q)),
)
print("prompts.tokens  ", prompts.tokens.shape, " [Q, P]")
print("rollout.tokens  ", rollout.tokens.shape, " [Q, G, T]")
print("lengths of completions:")
print(lengths)

# %% [markdown]
# ## Padded
#
# The usual layout gives each completion a line of its own, prompt first. Each
# colour is a prompt. The darker part is the prompt, the lighter part what was
# completed. Grey is padding: it costs as much as a token.

# %%
COLOURS = ["#2a6f97", "#9e2a2b", "#5f9e6e"]
PADDING = "#e3e6ea"


def lighter(colour, share=0.45):
  return 1 - share * (1 - np.array(colors.to_rgb(colour)))


def add_key(figure):
  """Explains the colours below the picture."""
  entries = {}
  for q, colour in enumerate(COLOURS):
    entries[f"prompt {q}"] = colour
    entries[f"completions of {q}"] = lighter(colour)
  entries["padding"] = PADDING
  figure.legend(
    handles=[patches.Patch(color=x, label=name) for name, x in entries.items()],
    loc="outside lower center",
    ncols=7,
    frameon=False,
    fontsize=8,
  )


def draw(axis, owner, is_prompt, label, title):
  """Rows of positions; `owner` is a prompt's number, or -1 for padding."""
  image = np.empty((*owner.shape, 3))
  image[:] = colors.to_rgb(PADDING)
  for q, colour in enumerate(COLOURS):
    image[(owner == q) & is_prompt] = colors.to_rgb(colour)
    image[(owner == q) & ~is_prompt] = lighter(colour)
  height, width = owner.shape
  axis.imshow(image, aspect="auto", extent=(0, width, height, 0))
  for r in range(height):  # a line where one segment ends
    for c in range(1, width):
      if label[r, c] != label[r, c - 1]:
        axis.plot([c, c], [r, r + 1], color="white", linewidth=1.5)
    axis.axhline(r, color="white", linewidth=3)
  axis.set_yticks(np.arange(height) + 0.5, range(height))
  axis.tick_params(length=0)
  axis.set_ylabel("row")
  share = (owner >= 0).mean()
  axis.set_title(
    f"{title}: {owner.size} positions, {share:.0%} of them used", loc="left"
  )
  for side in axis.spines.values():
    side.set_visible(False)


total = np.array(prompts.lengths[:, None] + lengths).reshape(-1)
column = np.arange(total.max())
is_used = column < total[:, None]
owner = np.where(is_used, np.repeat(np.arange(Q), G)[:, None], -1)
is_prompt = column < np.repeat(np.array(prompts.lengths), G)[:, None]

figure, axis = plt.subplots(figsize=(9, 4), layout="constrained")
draw(axis, owner, is_prompt, np.where(is_used, is_prompt, 2), "padded")
axis.set_xlabel("position")
add_key(figure)
plt.show()

# %% [markdown]
# ## A plan in integers
#
# Packing has two halves. `plan` sees only lengths, and says where each
# completion goes. `fill` then moves the tokens.
#
# Two facts make the counts. A position predicts the *next* token, so the last
# token of a completion is never read: it is only a target. And when
# neighbours share a prompt, its last token is not shared: each completion
# reads it itself, since each predicts a first token of its own from it.

# %%
L = 48  # positions in a row
counts = packing.count_tokens(prompts.lengths, lengths, share_prefix=True)
print("shared positions of each prompt, [Q]:   ", counts.prefix)
print("own positions of each completion, [Q, G]:")
print(counts.completion)

# %%
num_rows = packing.row_bound(Q * G, P + T - 1, L)  # always enough
plan = packing.plan(counts, row_length=L, num_rows=num_rows, window=12)
print("rows that always suffice:", num_rows)
print("rows in use:             ", plan.num_used)
print("row of each completion, [Q, G]:")
print(plan.row)
print("where in its row its own tokens start, [Q, G]:")
print(plan.offset)

# %% [markdown]
# ## Rows
#
# `fill` returns a `PackedBatch`: arrays of `R` rows with `L` positions.

# %%
weights = jnp.ones((Q, G))  # each completion counts for one
advantages = jnp.zeros((Q, G))


def pack(share_prefix, weights=weights):
  kept = rollout.replace(lengths=jnp.where(weights > 0, lengths, 0))
  counts = packing.count_tokens(prompts.lengths, kept.lengths, share_prefix)
  plan = packing.plan(counts, L, num_rows, window=12)
  rows = filling.fill(
    plan, counts, prompts, kept, advantages, weights, num_rows, L
  )
  return plan, jax.tree.map(lambda x: x[: plan.num_used], rows)


plan, rows = pack(share_prefix=True)
for name, value in vars(rows).items():
  print(f"{name:13} {value.dtype!s:8} {value.shape}")

# %% [markdown]
# Drawn, with and without sharing. White lines divide segments. A prompt that
# several completions share stands before them once.


# %%
def owners(plan, rows):
  """The prompt of each position, and whether the position reads the prompt."""
  start = np.zeros((len(rows.tokens), L), int) - 1
  for q in range(Q):
    for g in range(G):
      r = int(plan.row[q, g])
      if r >= 0:
        start[r, int(plan.offset[q, g])] = q
        start[r, int(plan.prefix_offset[q, g])] = q
  for c in range(1, L):
    start[:, c] = np.where(start[:, c] < 0, start[:, c - 1], start[:, c])
  is_real = np.array(rows.segment_ids) > 0
  owner = np.where(is_real, start, -1)
  lengths = np.array(prompts.lengths)[owner]
  return owner, np.array(rows.positions) < lengths


def draw_rows(axis, plan, rows, title):
  owner, is_prompt = owners(plan, rows)
  draw(axis, owner, is_prompt, np.array(rows.segment_ids), title)


plan_alone, rows_alone = pack(share_prefix=False)
sizes = len(rows_alone.tokens), len(rows.tokens)
figure, axes = plt.subplots(
  2, 1, figsize=(9, 4.6), height_ratios=sizes, sharex=True, layout="constrained"
)
draw_rows(axes[0], plan_alone, rows_alone, "packed")
draw_rows(axes[1], plan, rows, "packed, prompts shared")
axes[1].set_xlabel("position")
add_key(figure)
plt.show()

# %% [markdown]
# ## One row, position by position
#
# - `tokens` is what the model reads, `targets` what it should predict.
# - `positions` count from 0 in each prompt *with* its completion: they continue
#   where the shared prompt stopped.
# - `segment_ids` number the segments of a row from 1. 0 is padding.
# - `end` is one past the last position that may look at this one: the end of a
#   completion and, for a shared prompt, of the last completion behind it.
# - `is_trained` marks targets that a completion sampled. They are what the loss
#   sums over.

# %%
for name in (
  "tokens",
  "targets",
  "positions",
  "segment_ids",
  "end",
  "is_trained",
):
  values = getattr(rows, name)[0, :28].astype(int)
  print(f"{name:12}", *(f"{x:2}" for x in values))

# %% [markdown]
# ## The attention mask
#
# A query at position `q` sees a key at position `k` if `k <= q < end[k]`. That
# is the whole rule, in one line. No mask is ever stored: the attention takes
# the array `end`.


# %%
def mask(rows, r):
  """`[L, L]`, True where query i sees key j."""
  query, key = jnp.arange(L)[:, None], jnp.arange(L)
  return (key <= query) & (query < rows.end[r])


def draw_mask(axis, plan, rows, r, title):
  owner, is_prompt = (x[r] for x in owners(plan, rows))
  seen = np.array(mask(rows, r))
  image = np.ones((L, L, 3))
  for q, colour in enumerate(COLOURS):
    key = (owner == q) & is_prompt
    image[seen & key] = colors.to_rgb(colour)
    image[seen & (owner == q) & ~is_prompt] = lighter(colour)
  axis.imshow(image, extent=(0, L, L, 0))
  ends = np.flatnonzero(np.diff(np.array(rows.segment_ids[r]))) + 1
  for end in ends:
    axis.axhline(end, color="#c3c9d1", linewidth=0.7)
    axis.axvline(end, color="#c3c9d1", linewidth=0.7)
  axis.set(title=title, xlabel="looks at")


figure, axes = plt.subplots(1, 3, figsize=(10, 4.0), layout="constrained")
draw_mask(axes[0], plan_alone, rows_alone, 0, "row 0, nothing shared")
draw_mask(axes[1], plan, rows, 0, "row 0, prompt shared")
draw_mask(axes[2], plan, rows, 3, "row 3, two prompts shared")
axes[0].set_ylabel("position")
add_key(figure)
plt.show()

# %% [markdown]
# On the left every triangle is one completion with its prompt. In the middle
# the dark column is the shared prompt: later completions look back at it, past
# their neighbours, and never at the neighbours themselves. On the right two
# prompts share a row and know nothing of each other.
#
# ## Packed equals alone
#
# Does a completion get the same log-probabilities in a crowd? Here is a small
# random Qwen3. First each completion alone, in a row of its own.

# %%
model = ModelConfig(
  vocab=32,
  embed=32,
  layers=2,
  heads=4,
  kv_heads=2,
  head_dim=8,
  mlp=64,
  has_qk_norm=True,
  remat="none",
)
params = parameters.init(model, jax.random.key(0))
print(f"{parameters.num_parameters(model):,} parameters")


@jax.jit
def logprobs(tokens, targets, positions, end):
  """`[R, L]`, nats, of each target."""
  hidden = transformer.forward(params, model, tokens, positions, end)
  logp = jax.nn.log_softmax(transformer.logits(params, model, hidden))
  return jnp.take_along_axis(logp, targets[..., None], axis=-1)[..., 0]


def alone(q, g):
  """Log-probabilities of one completion, read by itself."""
  start, length = int(prompts.lengths[q]), int(lengths[q, g])
  prompt, completion = prompts.tokens[q, :start], rollout.tokens[q, g, :length]
  tokens = jnp.zeros((1, P + T), jnp.int32)
  tokens = tokens.at[0, : start + length].set(
    jnp.concatenate([prompt, completion])
  )
  positions = jnp.arange(P + T)[None]
  end = jnp.full_like(tokens, start + length)
  targets = jnp.roll(tokens, -1, axis=1)
  values = logprobs(tokens, targets, positions, end)
  return values[0, start - 1 : start + length - 1]


by_itself = {(q, g): alone(q, g) for q in range(Q) for g in range(G)}
print(
  "completion 0 of prompt 0 has", by_itself[0, 0].shape, "log-probabilities"
)
print(by_itself[0, 0])

# %% [markdown]
# Now all twelve at once, in the packed rows.

# %%
packed = logprobs(rows.tokens, rows.targets, rows.positions, rows.end)
print("in rows:", packed.shape)

worst = 0.0
for (q, g), expected in by_itself.items():
  # Trained positions start at the prompt's last token, which is its own.
  r, c = int(plan.row[q, g]), int(plan.offset[q, g])
  actual = packed[r, c : c + len(expected)]
  worst = max(worst, float(jnp.abs(actual - expected).max()))
print(f"largest difference: {worst:.1e} nats")
assert worst < 1e-5

# %% [markdown]
# Equal up to the rounding of float32. So the loss does not depend on how the
# batch was packed.
#
# ## What pruning saves
#
# A pruned completion has weight 0 and takes no place. Here half of them are
# left out: fewer rows, and no new compilation, since the loop over rows simply
# ends earlier.

# %%
keep = jnp.array([[1, 0, 1, 0], [0, 1, 0, 1], [1, 0, 1, 0]])
plan_half, rows_half = pack(True, weights=2.0 * keep)

figure, axes = plt.subplots(
  2,
  1,
  figsize=(9, 3.4),
  height_ratios=[len(rows.tokens), len(rows_half.tokens)],
  sharex=True,
  layout="constrained",
)
draw_rows(axes[0], plan, rows, "all 12 completions")
draw_rows(axes[1], plan_half, rows_half, "6 of 12 completions")
axes[1].set_xlabel("position")
add_key(figure)
plt.show()

# %% [markdown]
# ## How far ahead the packer looks
#
# The packer chooses among the `window` oldest completions that wait. With a
# window of 1 it takes them as they come. Here are 256 completions of 32
# prompts, in rows of 160.

# %%
rng = np.random.default_rng(1)
many = packing.count_tokens(
  jnp.array(rng.integers(4, 24, 32)),
  jnp.array(rng.integers(4, 65, (32, 8))),
  share_prefix=True,
)
bound = packing.row_bound(256, 24 + 64, 160)
find = jax.jit(packing.plan, static_argnums=(1, 2, 3))
print("window  rows")
for window in (1, 4, 16, 64, 256):
  used = int(find(many, 160, bound, window).num_used)
  print(f"{window:6}  {used:4}")
least = int(many.completion.sum() + many.prefix.sum())
print(f"no packer needs fewer than {-(-least // 160)}")

# %% [markdown]
# ## Where this is in the code
#
# - [`algo/packing.py`](../dppo_jax/algo/packing.py): `count_tokens`, `plan`;
#   [`algo/filling.py`](../dppo_jax/algo/filling.py): `fill`.
# - [`models/attention`](../dppo_jax/models/attention): the mask, in blocks or
#   in a kernel.
# - `config.pack`: `row_length`, `rows_per_micro`.
