"""The same three steps on every mesh: sharded equals unsharded."""

import collections
import functools
import math
import re

import chex
import jax
import numpy as np
import pytest

from dppo_jax import data, rewards, sharding
from dppo_jax.algo.packing import PackingSpec
from dppo_jax.models import hf, moe, parameters
from dppo_jax.models.config import LocalLayers, ModelConfig
from dppo_jax.rng import rng_at
from dppo_jax.run.setup import setup_run
from dppo_jax.step import abstract_values, programs
from dppo_jax.step.pack import pack
from dppo_jax.step.train_step import TrainStep
from tests.helpers import commands, small

pytestmark = pytest.mark.slow


class _Grader:
  """Something to learn that depends on nothing but the tokens."""

  specs = rewards.parse("exact")

  def grade(self, prompts, completions, answers, columns, **unused):
    right = np.array([len(text) % 3 > 0 for text in completions], np.float32)
    return rewards.Graded(right, right, collections.Counter(), {})


def _config(mesh, method, **overrides):
  """An untrained model with two key-value heads."""
  replicas, data_axis, model_axis = mesh
  tiny = {
    "steps": 4,
    "model__shape__layers": 1,
    "model__shape__embed": 16,
    "model__shape__mlp": 32,
    "model__shape__heads": 8,
    "model__shape__head_dim": 8,
    "data__eval": "",
    "data__train": "arithmetic:20:1",  # an epoch of two steps
    "data__prompts_per_step": 8,
    "rollout__group_size": 4,
    "rollout__max_tokens": 8,
    "rollout__num_slots": 4,  # one stage of decoding to compile
    "pack__row_length": 24,
    "pack__rows_per_micro": 8,
    "optimizer__learning_rate": 1e-2,
    "sft__steps": 0,
    "mesh__replicas": replicas,
    "mesh__data": data_axis,
    "mesh__model": model_axis,
  }
  c = commands.config(f"arithmetic:{method}", **tiny | overrides)
  c.objective.args["beta"] = 0.1
  if c.method.name == "neyman":
    # Updates are given a cost, in place of measured seconds.
    budgets = {"prompt_budget": 0.75, "update_cost": 9.0}
    c.method.args |= budgets | {"token_budget": 0.5}
    c.objective.inner_updates = 2
  if c.method.name in ("neyman", "greso"):
    c.objective.mini_batches = 2
  return c


def _three_steps(mesh, method="dppo", **overrides):
  """Tokens of three steps and the state after them, on a mesh."""
  run = setup_run(_config(mesh, method, **overrides))
  with jax.set_mesh(run.spec.mesh):
    step = TrainStep(run.spec, run.train_set, run.tokenizer, _Grader())
    state = abstract_values.new_train_state(run.spec, run.initial_params())
    reference = None
    if run.spec.has_reference:
      reference = jax.tree.map(lambda x: x.copy(), state.params)
    tokens = []
    for i in range(3):
      rng = rng_at(run.spec.root_key, i)
      state, experience = step.collect(state)
      batches = step.select(rng, experience, state)
      batches = step.score(rng, state.params, batches)
      state, updates = step.update(state, reference, batches)
      step.info(state, experience, batches, updates)
      tokens.append(
        jax.device_get((experience.rollout.tokens, experience.rollout.lengths))
      )
    assert updates[-1]["update/kl"] > 0
    return tokens, jax.device_get(state)


@functools.cache
def _on_one_device(method):
  return _three_steps((1, 1, 1), method)


@pytest.mark.parametrize(
  ("method", "mesh"),
  [
    ("greso", (1, 8, 1)),
    ("neyman", (1, 4, 2)),
    # From here on there are fewer heads of keys and values than devices that
    # divide them, or several replicas.
    ("dppo", (1, 1, 8)),
    ("dppo", (2, 2, 2)),
  ],
)
def test_a_mesh_changes_no_token_and_weights_only_by_rounding(method, mesh):
  want, reference = _on_one_device(method)
  tokens, state = _three_steps(mesh, method)
  chex.assert_trees_all_equal(tokens, want)
  for actual, wanted in (
    (state.params, reference.params),
    (state.history, reference.history),
  ):
    chex.assert_trees_all_close(actual, wanted, rtol=1e-7, atol=2e-4)
  if method == "neyman":
    assert reference.noise.noise > 0
    chex.assert_trees_all_close(state.noise, reference.noise, rtol=1e-3)
  start = setup_run(_config((1, 1, 1), method)).initial_params()
  moved = np.abs(np.asarray(start["embed"]) - state.params["embed"]).max()
  assert moved > 5e-3  # so that agreement says something


def test_a_mesh_does_not_change_windows(tmp_path):
  """Four heads share one head of keys; windows are shorter than prompts."""
  tokenizer = data.CharacterTokenizer()
  model = ModelConfig(
    vocab=tokenizer.vocab_size,
    embed=32,
    layers=3,
    heads=4,
    kv_heads=1,
    head_dim=8,
    mlp=32,
    has_qk_norm=True,
    has_post_norms=True,
    has_zero_centred_norms=True,
    has_scaled_embedding=True,
    activation="gelu_pytorch_tanh",
    local=LocalLayers((True, False, True), window=3, rope_theta=100.0),
    family="Gemma3ForCausalLM",
  )
  hf.save(tmp_path, parameters.init(model, jax.random.key(0)), model)
  tokenizer.save(tmp_path)
  (want, reference), (tokens, state) = (
    _three_steps(mesh, model__path=str(tmp_path))
    for mesh in ((1, 1, 1), (1, 2, 4))
  )
  chex.assert_trees_all_equal(tokens, want)
  # A fifth of a step of AdamW, which magnifies rounding of small gradients.
  chex.assert_trees_all_close(
    state.params, reference.params, rtol=1e-7, atol=2e-3
  )
  norm = state.params["layers"]["mlp_post_norm"]
  start = hf.load(tmp_path)[0]["layers"]["mlp_post_norm"]
  assert np.abs(norm - np.asarray(start)).max() > 1e-3


def test_a_mesh_does_not_change_a_mixture_of_experts(tmp_path):
  tokenizer = data.CharacterTokenizer()
  model = ModelConfig(
    vocab=tokenizer.vocab_size,
    embed=32,
    layers=1,
    heads=4,
    kv_heads=2,
    head_dim=8,
    mlp=32,
    has_qk_norm=True,
    experts=moe.Experts(num=4, per_token=2, mlp=16, is_normalized=True),
    family="Qwen3MoeForCausalLM",
  )
  hf.save(tmp_path, parameters.init(model, jax.random.key(0)), model)
  tokenizer.save(tmp_path)
  (want, reference), (tokens, state) = (
    _three_steps(mesh, model__path=str(tmp_path))
    for mesh in ((1, 1, 1), (2, 2, 2))
  )
  chex.assert_trees_all_equal(tokens, want)
  chex.assert_trees_all_close(
    state.params, reference.params, rtol=1e-7, atol=2e-4
  )
  router = state.params["layers"]["router"]
  start = hf.load(tmp_path)[0]["layers"]["router"]
  assert np.abs(router - np.asarray(start)).max() > 1e-3


def test_a_mesh_does_not_change_the_steps_of_another_optimizer(tmp_path):
  """Adafactor's moments have other shapes than their weights."""
  (tmp_path / "my.py").write_text(
    "import optax\n"
    "def factored(learning_rate):\n"
    "  return optax.adafactor(learning_rate, min_dim_size_to_factor=8)\n"
  )
  function = {"optimizer__function": f"{tmp_path}/my.py:factored"}
  (want, reference), (tokens, state) = (
    _three_steps(mesh, **function) for mesh in ((1, 1, 1), (2, 2, 2))
  )
  chex.assert_trees_all_equal(tokens, want)
  chex.assert_trees_all_close(
    state.params, reference.params, rtol=1e-7, atol=2e-4
  )
  shapes = {x.shape for x in jax.tree.leaves(state.opt_state)}
  assert not shapes <= {x.shape for x in jax.tree.leaves(state.params)} | {()}


def test_gather_width_moves_only_the_parts_of_other_devices():
  """A device receives only its slice of the axes that `model` divides."""
  mesh, axes = sharding.make_mesh(2, 4), ("embed", "mlp")
  weight = np.arange(16 * 24, dtype=np.float32).reshape(16, 24)
  places = sharding.sharding(mesh, *axes), sharding.sharding(mesh, None, "mlp")
  with jax.set_mesh(mesh):
    gather = jax.shard_map(
      lambda w: sharding.gather_width(w, *axes),
      in_specs=sharding.spec(("embed", None)),
      out_specs=jax.P(),
      axis_names=set(sharding.RULES["batch"]),
      check_vma=False,
    )
    gather = jax.jit(gather, in_shardings=places[0], out_shardings=places[1])
    text = gather.lower(weight).compile().as_text()
    np.testing.assert_array_equal(gather(weight), weight)
  gathered = re.findall(r"(\w+\[[\d,]+\])\S* all-gather\(", text)
  assert gathered == ["f32[16,6]"]


def test_replicas_exchange_gradients_and_nothing_else():
  """Each device exchanges its part once per micro-batch."""
  c = _config((2, 2, 2), "dppo")
  run = setup_run(c)
  with jax.set_mesh(run.spec.mesh):
    lowered = programs.step_programs(run.spec)["update"]()
  sizes = collections.Counter()
  for line in lowered.compile().as_text().splitlines():
    match = re.search(rf" = (.*?) ({_COLLECTIVES})(?:-start)?\(", line)
    if match and any(min(x) < 4 <= max(x) for x in _groups(line)):
      shapes = re.findall(r"\w\[([\d,]*)\]", match[1])
      sizes[match[2]] += sum(
        math.prod(int(n) for n in shape.split(",") if n) for shape in shapes
      )
  params = abstract_values.abstract_params(run.spec)
  share = lambda x: math.prod(x.sharding.shard_shape(x.shape))
  shares = sum(map(share, jax.tree.leaves(params)))
  assert sizes.keys() == {"all-reduce"}
  # The embedding's twice, as input and as head; a few norms and sums.
  assert shares <= sizes["all-reduce"] < shares + share(params["embed"]) + 100


_COLLECTIVES = (
  "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter|"
  "collective-broadcast"
)


def _groups(line):
  """The devices of each group of a collective, in each way of writing them."""
  if named := re.search(r"groups=mesh\[([^\]]*)\](?: {([^}]*)})?", line):
    sizes = dict(re.findall(r"'(\w+)'=(\d+)", named[1]))
    used = re.findall(r"'(\w+)'", named[2] or "") or list(sizes)
    ids = np.arange(8).reshape([int(x) for x in sizes.values()])
    last = np.argsort([name in used for name in sizes], kind="stable")
    size = math.prod(int(sizes[name]) for name in used)
    return ids.transpose(last).reshape(-1, size).tolist()
  if iota := re.search(
    r"groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line
  ):
    shape, source, order = (
      [int(n) for n in x.split(",")] if x else None for x in iota.groups()
    )
    ids = np.arange(8).reshape(source).transpose(order)
    return ids.reshape(shape).tolist()
  listed = re.search(r"(?:groups|pairs)=\{(\{[\d,{}]+\})\}", line)[1]
  groups = re.findall(r"\{([\d,]+)\}", listed)
  return [[int(n) for n in group.split(",")] for group in groups]


@pytest.mark.parametrize("mesh", [(8, 1, 1), (2, 2, 2)])
@pytest.mark.parametrize("row_length", [24, 8])
def test_packing_on_a_mesh_equals_packing_on_one_device(mesh, row_length):
  """Covers a number of prompts that no mesh divides, and rows that overflow."""
  want, actual = _packed(mesh, row_length)
  here = actual[0].tokens.sharding.shard_shape(actual[0].tokens.shape)
  assert here[1] == 16 // (mesh[0] * mesh[2])
  chex.assert_trees_all_equal(jax.device_get(actual), want)
  assert (want[2]["pack/unplaced"] > 0) == (row_length == 8)
  assert want[1] > 1


def test_rows_go_to_the_devices_in_turn():
  """The last micro-batch leaves no device two rows and another none."""
  want, actual = _packed((4, 1, 1), 24, spread_rows=True)
  rows = lambda x: np.asarray(x[0].tokens).reshape(-1, 16, 24)
  in_turn = rows(want).reshape(-1, 4, 4, 24).swapaxes(1, 2)
  np.testing.assert_array_equal(rows(actual).reshape(in_turn.shape), in_turn)
  num_used = (np.asarray(actual[0].segment_ids) > 0).any(2).reshape(-1, 4, 4)
  last = num_used[int(actual[1]) - 1].sum(1)
  assert 0 < last.sum() < 16 and last.max() - last.min() <= 1


def test_no_device_holds_all_tokens():
  mesh = sharding.make_mesh(8)
  spec = PackingSpec(24, rows_per_micro=8, window=6)
  prompts = small.prompts(num=16)
  rollout = small.rollout(prompts, group=3, tokens=5)
  place = sharding.sharding(mesh, "batch")
  prompts, rollout = (
    jax.tree.map(lambda x: jax.device_put(x, place) if x.ndim else x, tree)
    for tree in (prompts, rollout)
  )
  weights = np.ones((16, 3), np.float32)
  with jax.set_mesh(mesh):
    lowered = jax.jit(functools.partial(pack, spec=spec)).lower(
      prompts, rollout, weights, weights
    )
  text = lowered.compile().as_text()
  assert "s32[2,3,5]" in text and "f32[2,3,5]" in text  # a device's own
  assert "[16,3,5]" not in text and "[48,5]" not in text


def _packed(mesh, row_length, **more):
  """25 prompts of 4 completions packed without a mesh, and on one."""
  prompts = small.prompts(num=25)
  rollout = small.rollout(prompts, group=4)
  ones = np.arange(100, dtype=np.float32).reshape(25, 4)
  spec = PackingSpec(row_length, rows_per_micro=16, window=6, **more)
  run = lambda: jax.jit(functools.partial(pack, spec=spec))(
    prompts, rollout, ones, ones + 1
  )
  want = jax.device_get(run())
  with jax.set_mesh(sharding.make_mesh(*mesh)):
    return want, run()
