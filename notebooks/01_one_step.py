# %% [markdown]
# # One training step, stage by stage
#
# ```
# draw → choose prompts → roll out → grade → update history
#   → select (advantages, completions, weights, packing) → score → update
# ```
#
# These are the stages of a step. Here we walk through them once, slowly, with a
# tiny model on small sums, and look at every array on the way. The functions
# are those that `python -m dppo_jax.main` calls.
#
# The letters in shapes: `N` prompts drawn, `Q` prompts rolled out, `G`
# completions of each, `T` tokens of a completion, `R` rows of `L` positions.

# %%
import jax
import jax.numpy as jnp
from matplotlib import patches
import matplotlib.pyplot as plt
import numpy as np

from dppo_jax import config, data
from dppo_jax.algo.weights import horvitz_thompson
from dppo_jax.metrics import progress
from dppo_jax.records import Groups
from dppo_jax.rng import Stage, rng_at
from dppo_jax.run import compile_cache, description, setup, sft
from dppo_jax.step import abstract_values, grade, update
from dppo_jax.step.train_step import TrainStep

compile_cache.quiet_libraries()

# %% [markdown]
# ## What a run is
#
# A config states every option. Here: 16 prompts a step, 6 completions of each,
# problems of one to three operations, the method `dppo`.

# %%
c = config.Config()
config.use_method(c, "dppo")
c.model.remat = "none"
c.data.train = "arithmetic:146:3"  # one in eight is held out
c.data.eval = ""
c.data.prompts_per_step = 16
c.rollout.group_size = 6
c.rollout.max_tokens = 40
c.rollout.num_slots = 96
c.pack.row_length = 96
c.pack.rows_per_micro = 4
c.optimizer.learning_rate = 1e-4

run = setup.setup_run(c)
print(description.description(run, c))

# %% [markdown]
# The data are rows of token numbers. Here the tokens are characters.

# %%
problems = run.train_set
print(
  "tokens ", problems.tokens.shape, "one row a problem, padded at the right"
)
print("lengths", problems.lengths.shape)
for i in range(3):
  print(f"{problems.problems[i]:8} answer {problems.answers[i]}")
print("row 0 as tokens:", problems.tokens[0])

# %% [markdown]
# ## A model that can do something
#
# A model that never earns a reward learns nothing from rewards. So it first
# imitates solutions for a few seconds. Half of them show the work, half guess.

# %%
with jax.set_mesh(run.spec.mesh):
  params = sft.tune(run, run.initial_params(), 70, print, progress.Progress())
num_weights = sum(x.size for x in jax.tree.leaves(params))
print(f"{num_weights:,} weights in {len(jax.tree.leaves(params))} arrays")

# %% [markdown]
# ## The stages, compiled
#
# Each stage is a pure function of arrays. All of them are compiled once, before
# the first step, for the one shape that they will ever see. This takes a while.

# %%
grader = run.make_grader()
grader.__enter__()  # starts its processes, if the rewards need any
with jax.set_mesh(run.spec.mesh):
  train_step = TrainStep(run.spec, run.train_set, run.tokenizer, grader)
  state = abstract_values.init_train_state(run.spec, params)

stages = train_step.programs
print("stages:", *stages)
print("state: ", *vars(state))
before_pruning = jax.tree.map(lambda x: x.shape, state.history)
print("what the method remembers of each problem:", before_pruning)

# %% [markdown]
# ## A step in four calls
#
# This is the training loop. `dppo` prunes a prompt by the result of its last
# visit, so we first visit every problem once: 8 steps of 16 prompts.

# %%
with jax.set_mesh(run.spec.mesh):
  for i in range(8):
    rng = rng_at(run.spec.root_key, i)
    state, experience = train_step.collect(state)
    batches = train_step.select(rng, experience, state)
    batches = train_step.score(rng, state.params, batches)
    state, updates = train_step.update(state, None, batches)
    print(f"step {i}: mean reward {np.mean(experience.rewards):.2f}")

# %% [markdown]
# Now step 8, in slow motion.
#
# ## 1. Draw
#
# Which prompts come when is a function of the seed and the number of the draw.
# Nothing is remembered between steps, so a resumed run sees the same.

# %%
num_prompts = c.data.prompts_per_step
draw = int(state.draws)
prompts = data.draw(problems, run.spec.root_key, draw, num_prompts)
print("ids    ", prompts.ids.shape, prompts.ids)
print("tokens ", prompts.tokens.shape, "[N, P]")
print("lengths", prompts.lengths.shape, prompts.lengths)
print("texts  ", *(problems.problems[i] for i in prompts.ids))

# %% [markdown]
# ## 2. Choose prompts
#
# Before anything is sampled, some prompts are dropped. dppo looks at the mean
# |advantage| of the last visit. Below the average of this batch, a prompt is
# kept with probability 1/2. Where all completions were right, or all wrong,
# that mean was 0: there was nothing to learn.

# %%
rng = rng_at(run.spec.root_key, draw, Stage.PROMPTS)._replace(step=state.step)
chosen = stages["choose_prompts"](
  rng=rng, history=state.history, ids=prompts.ids, limit=np.int32(num_prompts)
)
print("keep", chosen.keep.shape, chosen.keep.astype(int))
print("prob", chosen.prob.shape, chosen.prob)
score = state.history[prompts.ids]
print("score of the last visit", score.shape, score.round(2))

# %% [markdown]
# ## 3. Roll out
#
# `G` completions of every kept prompt are sampled. Slots decode side by side;
# a free slot takes the next completion. The result has a fixed shape: a
# pruned prompt is a row of length 0.

# %%
with jax.set_mesh(run.spec.mesh):
  inference_params = stages["to_inference_params"](params=state.params)
  rng = rng_at(run.spec.root_key, draw, Stage.ROLLOUT)
  rollout = stages["roll_out"](
    inference_params=inference_params, prompts=prompts, rng=rng, kept=chosen
  )
print("tokens    ", rollout.tokens.shape, "[Q, G, T]")
print("logprobs  ", rollout.logprobs.shape, "nats, of each token sampled")
print("lengths   ", rollout.lengths.shape)
print(rollout.lengths)
print("is_stopped", rollout.is_stopped.shape, rollout.is_stopped.mean())

# %% [markdown]
# As text, the completions of the first kept prompt:

# %%
q = int(np.argmax(chosen.keep))
print("problem:", problems.problems[prompts.ids[q]])
for g in range(c.rollout.group_size):
  length = int(rollout.lengths[q, g])
  text = run.tokenizer.decode(np.array(rollout.tokens[q, g, :length]))
  prob = float(np.exp(rollout.logprobs[q, g, :length].sum()))
  print(f"  {text:24} probability {prob:.3f}")

# %% [markdown]
# ## 4. Grade
#
# Rewards are plain functions of text. This one compares what is in the last box
# with the answer.

# %%
graded = grade.grade(rollout, problems, run.tokenizer, grader)
rewards = graded.rewards
print("rewards", rewards.shape, "[Q, G]")
print(rewards.astype(int))
no_signal = rewards.max(axis=1) == rewards.min(axis=1)
kept = np.array(chosen.keep)
print(
  f"{kept.sum()} prompts kept; {(no_signal & kept).sum()} of them teach nothing"
)

# %% [markdown]
# ## 5. Update history
#
# What this visit taught is written down for the next one.

# %%
old = state.history[prompts.ids]
history, num_draws = stages["update_history"](
  history=state.history,
  step=state.step,
  draws=state.draws,
  rollout=rollout,
  rewards=rewards,
  correct=graded.correct,
)
print("before", old.round(2))
print("now   ", history[prompts.ids].round(2))
state = state.replace(history=history, draws=num_draws)

# %% [markdown]
# Pruned prompts keep their old score.
#
# ## 6. Select: advantages
#
# The reward, less the mean of its group, over the group's deviation. It is
# computed from all `G` completions, before any is dropped.

# %%
advantages = run.spec.objective.advantage(rewards)
print("advantages", advantages.shape, "[Q, G]")
print(advantages.round(2))

# %% [markdown]
# ## 7. Select: completions and weights
#
# A rule sees the groups and returns what it keeps, and with which probability.
# The weight is 1 over the probability of the prompt times that of the
# completion. On average the weighted sum is then the sum over everything
# (notebook 02 proves it by listing every outcome).

# %%
groups = Groups(jnp.array(rewards), advantages, rollout.lengths)
rng = rng_at(run.spec.root_key, int(state.step), Stage.COMPLETIONS)
picked = run.spec.method.completions(rng, groups)
weights = horvitz_thompson(chosen, picked)
weights = jnp.where(rollout.lengths > 0, weights, 0.0)
print("keep   ", picked.keep.shape)
print("prob   ", picked.prob.shape)
print("weights", weights.shape)
print(weights)

# %% [markdown]
# All three side by side. Hatched rows are prompts that were pruned. White
# weights are completions that were dropped. Where the advantage is 0, the
# weight does not matter: such a completion adds nothing, and takes no place
# below.

# %%
panels = {
  "reward": (rewards, "Greens", 0, 1.6),
  "advantage": (advantages, "RdBu", -2.5, 2.5),
  "weight": (weights, "Purples", 0, 5),
}
figure, axes = plt.subplots(
  1, 3, figsize=(9, 5), sharey=True, layout="constrained"
)
for axis, (name, (values, cmap, low, high)) in zip(
  axes, panels.items(), strict=True
):
  axis.imshow(values, cmap=cmap, vmin=low, vmax=high, aspect="auto")
  for (q, g), value in np.ndenumerate(np.array(values)):
    if kept[q] and value:
      axis.text(g, q, f"{value:.2g}", ha="center", va="center", fontsize=8)
  for q in np.flatnonzero(~kept):
    axis.axhspan(
      q - 0.5, q + 0.5, fc="#f1f3f5", ec="#b4bcc6", hatch="///", lw=0
    )
  axis.set(title=name, xlabel="completion", xticks=range(c.rollout.group_size))
  axis.tick_params(length=0)
axes[0].set_yticks(
  range(num_prompts), [problems.problems[i] for i in prompts.ids]
)
pruned = patches.Patch(
  fc="#f1f3f5", ec="#b4bcc6", hatch="///", label="pruned prompt"
)
dropped = patches.Patch(
  fc="white", ec="#b4bcc6", label="0 (as a weight: dropped)"
)
figure.legend(
  handles=[pruned, dropped], loc="outside lower center", ncols=2, frameon=False
)
plt.show()

# %% [markdown]
# ## 8. Select: packing
#
# The stage `select` does 6 and 7 and packs what is left side by side in rows.
# Rows come in micro-batches of one fixed shape. Only those in use are computed.

# %%
with jax.set_mesh(run.spec.mesh):
  batch, num_micro, selected, _ = stages["select"](
    rng=rng,
    prompts=prompts,
    rollout=rollout,
    rewards=rewards,
    budget=None,
    part=np.int32(0),  # there is one update on a rollout
  )
for name, value in vars(batch).items():
  print(f"{name:13} {value.dtype!s:8} {value.shape}")
print("[M, R, L]; micro-batches in use:", num_micro)
print(f"tokens generated {int(rollout.lengths.sum())}", end=", ")
print(f"trained on {int(selected['tokens/trained'])}")

# %% [markdown]
# The rows in use, coloured by what each token's loss is multiplied with:
# advantage x weight / length of the completion. Blue becomes likelier, red less
# likely. Grey is read only: shared prompts.

# %%
used = int(selected["pack/rows"])
flat = lambda x: np.array(x).reshape(-1, c.pack.row_length)[:used]
pull = flat(batch.advantages) * flat(batch.weights)
bound = np.abs(pull).max()
image = plt.get_cmap("RdBu")(0.5 + pull / (2 * bound))
image[(flat(batch.segment_ids) > 0) & ~flat(batch.is_trained)] = 0.75
image[flat(batch.segment_ids) == 0] = 1.0
figure, axis = plt.subplots(figsize=(9, 1.0 + 0.3 * used), layout="constrained")
axis.imshow(image, aspect="auto", interpolation="nearest")
axis.set(xlabel="position", ylabel="row", yticks=range(used))
axis.set_title(
  f"{selected['pack/fill']:.0%} of the positions are used", loc="left"
)
axis.spines[:].set_visible(False)
for r in range(1, used):
  axis.axhline(r - 0.5, color="white", linewidth=3)
entries = {
  "becomes more likely": plt.get_cmap("RdBu")(0.9),
  "becomes less likely": plt.get_cmap("RdBu")(0.1),
  "read only": (0.75, 0.75, 0.75),
}
figure.legend(
  handles=[patches.Patch(color=x, label=name) for name, x in entries.items()],
  loc="outside lower center",
  ncols=3,
  frameon=False,
)
plt.show()

# %% [markdown]
# ## 9. Score
#
# Methods that choose *tokens* need one more pass over the model here, and so
# does an objective with several updates on a rollout. `dppo` needs neither, so
# this run has no such stage.

# %%
print("has a stage to score:", "score" in stages)

# %% [markdown]
# ## 10. Update
#
# Gradients are summed over the micro-batches in use, and divided once, by the
# number of completions of the *unpruned* batch. Then AdamW takes a step.

# %%
denominator = np.float32(num_prompts * c.rollout.group_size)


@jax.jit
def logprobs_of(params):
  """`[M, R, L]`, nats, of every target of the batch."""
  of_rows = lambda rows: update.logprobs(
    params, rows, rows.is_trained, spec=run.spec
  )
  return jax.lax.map(of_rows, batch)


with jax.set_mesh(run.spec.mesh):
  before = logprobs_of(state.params)
  state, updated = stages["update"](
    state=state,
    reference=None,
    batch=batch,
    num_micro=num_micro,
    denominator=denominator,
    number=np.int32(0),
  )
  after = logprobs_of(state.params)

for name, value in updated.items():
  print(f"{name:26} {float(value):.4g}")

# %% [markdown]
# Did it do what it should? Sum each completion's log-probability before and
# after. Right answers should have become likelier, wrong ones less likely.
# Every dot is a completion that was trained on.

# %%
segments = flat(batch.segment_ids) + 100 * np.arange(used)[:, None]
points = []
for segment in np.unique(segments[flat(batch.weights) > 0]):
  mask = (segments == segment) & flat(batch.is_trained)
  change = (flat(after) - flat(before))[mask].sum()
  points.append((pull[mask].sum(), change))
x, y = np.array(points).T
figure, axis = plt.subplots(figsize=(6, 3.8), layout="constrained")
axis.axhline(0, color="#c3c9d1", linewidth=0.8)
axis.axvline(0, color="#c3c9d1", linewidth=0.8)
for name, mask, colour in (
  ("advantage above 0", x > 0, "#2a6f97"),
  ("advantage below 0", x < 0, "#9e2a2b"),
):
  axis.scatter(x[mask], y[mask], color=colour, alpha=0.7, label=name)
axis.legend(frameon=False)
axis.set(xlabel="advantage x weight", ylabel="change of log-probability, nats")
axis.spines[["top", "right"]].set_visible(False)
plt.show()
print(f"moved the right way: {np.mean(np.sign(x) == np.sign(y)):.0%}")

# %%
grader.__exit__(None, None, None)

# %% [markdown]
# That was one step. `python -m dppo_jax.main` repeats it, evaluates, saves and
# reports.
#
# ## Where this is in the code
#
# - [`train.py`](../dppo_jax/train.py): the loop;
#   [`train_step.py`](../dppo_jax/step/train_step.py): stages 1 to 5.
# - [`select.py`](../dppo_jax/step/select.py): stages 6 to 8;
#   [`tokens.py`](../dppo_jax/step/tokens.py): stage 9;
#   [`update.py`](../dppo_jax/step/update.py): stage 10.
# - [`methods/dppo.py`](../dppo_jax/methods/dppo.py): the two rules.
