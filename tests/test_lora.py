"""LoRA: only adapters are trained, and they are what PEFT takes them to be."""

import dataclasses
import functools
import json

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import numpy as stored
from test_export import SETTINGS, our_tokens, write_source
from test_meshes import _three_steps

from dppo_jax import config as configs
from dppo_jax import export, train
from dppo_jax.algo.packing import PackingSpec
from dppo_jax.errors import UserError
from dppo_jax.models import hf, lora, parameters, transformer
from dppo_jax.models.hf import peft
from dppo_jax.planning import memory
from dppo_jax.records import TrainState
from dppo_jax.run import checkpoint, setup
from dppo_jax.step import abstract_values, update
from dppo_jax.step.pack import pack
from tests.helpers import commands, small

pytestmark = pytest.mark.slow

ADAPTERS = lora.Lora(3, 6.0, tuple(lora.LINEAR))
MODEL = dataclasses.replace(small.MODEL, lora=ADAPTERS)
LORA = {
  "lora__rank": 2,
  "optimizer__learning_rate": 0.05,
  "reward__functions": f"{__file__}:parity",
}


def parity(prompts, completions, answers):
  """A reward that differs within a group, however bad the policy is."""
  del prompts, answers
  return [len(x) % 2 for x in completions]


def moved(params, seed=0):
  """Returns weights with adapters whose `B` is not zero."""
  rng = np.random.default_rng(seed)
  move = lambda x: x + jnp.asarray(rng.normal(0, 0.1, x.shape), x.dtype)
  return params | jax.tree.map(move, lora.trainable(params))


def rows():
  prompts = small.prompts()
  ones = jnp.ones((3, 3))
  spec = PackingSpec(row_length=24, rows_per_micro=2, window=4)
  return pack(prompts, small.rollout(prompts), ones, ones, spec)[:2]


@functools.partial(jax.jit, static_argnums=2)
def gradient(params, batch, model):
  spec = small.spec(model=model)
  return update.sum_gradients(*batch, params, None, spec=spec).grad


def test_new_adapters_change_nothing():
  params = small.params(config=MODEL)
  assert set(lora.frozen(params)) == set(small.params())
  batch = jax.tree.map(lambda x: x[0], rows()[0])
  args = batch.tokens, batch.positions, batch.end
  forward = jax.jit(transformer.forward, static_argnums=1)
  with_adapters = forward(params, MODEL, *args)
  alone = forward(lora.frozen(params), small.MODEL, *args)
  chex.assert_trees_all_equal(with_adapters, alone)
  assert not np.allclose(forward(moved(params), MODEL, *args), alone)


@pytest.mark.parametrize("remat", ["none", "layers", "dots"])
def test_gradient_follows_from_that_of_the_merged_weights(remat):
  """Chain rule: `dA = dW B^T` and `dB = A^T dW`, times alpha / rank.

  So what holds for gradients of weights in expectation holds for adapters.
  """
  params = moved(small.params(config=MODEL))
  actual = gradient(params, rows(), dataclasses.replace(MODEL, remat=remat))
  assert actual.keys() == {"adapters"}
  merged = lora.merge_all(params, ADAPTERS)
  full = gradient(merged, rows(), small.MODEL)["layers"]
  merge = lambda x: lora.merge(params["layers"], x, ADAPTERS)
  _, pull_back = jax.vjp(merge, params["adapters"])
  (expected,) = pull_back(full)
  chex.assert_trees_all_close(
    actual["adapters"], expected, rtol=2e-4, atol=1e-6
  )


def trained(workdir, **options):
  """Returns the config and the last state of a run."""
  c = commands.config("arithmetic:grpo", **SETTINGS | LORA | options)
  train.run(c, workdir)
  run = setup.setup_run(c)
  like = abstract_values.abstract_train_state(run.spec)
  with checkpoint.Checkpoints(workdir, read_only=True) as checkpoints:
    return c, checkpoints.restore(checkpoints.latest_step(), like)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  workdir = tmp_path_factory.mktemp("lora") / "run"
  options = {"steps": 4, "checkpoint__every": 2, "checkpoint__keep": 3}
  return workdir, *trained(workdir, sft__steps=2, **options)


def test_run_trains_only_adapters_on_policy(run):
  workdir, c, state = run
  first = setup.setup_run(c)
  like = abstract_values.abstract_train_state(first.spec)
  with checkpoint.Checkpoints(workdir, read_only=True) as checkpoints:
    start = checkpoints.restore(0, like)
  chex.assert_trees_all_equal(
    lora.frozen(start.params), lora.frozen(state.params)
  )
  b = state.params["adapters"]["q"]["b"]
  assert (start.params["adapters"]["q"]["b"] == 0).all() and (b != 0).any()
  moments = [x.shape for x in jax.tree.leaves(state.opt_state) if x.ndim]
  adapters = [x.shape for x in jax.tree.leaves(state.params["adapters"])]
  assert sorted(moments) == sorted(2 * adapters)
  lines = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
  ratios = [x["update/policy_ratio_max"] for x in lines if "update/loss" in x]
  assert len(ratios) == 4 and max(ratios) < 1 + 1e-4
  saved = [x.name for x in (workdir / "checkpoints/2").iterdir()]
  assert "params" in saved and "frozen" not in saved


def test_resumed_run_equals_an_uninterrupted_one(run, tmp_path):
  _, _, expected = run
  trained(tmp_path, steps=2, sft__steps=2, checkpoint__every=2)
  _, state = trained(tmp_path, steps=4, sft__steps=2, checkpoint__every=2)
  chex.assert_trees_all_equal(state, expected)


def test_export_has_the_merged_weights(run, tmp_path):
  workdir, c, state = run
  export.run(c, workdir, tmp_path / "merged")
  params, _ = hf.load(str(tmp_path / "merged"))
  model = setup.setup_run(c).spec.model
  chex.assert_trees_all_close(params, lora.merge_all(state.params, model.lora))
  assert our_tokens(tmp_path / "merged") != our_tokens_of_base(
    c, workdir, tmp_path
  )


def test_adapters_are_exported_without_the_weights_they_adapt(tmp_path):
  """They name the model that was read, and not the hub's."""
  write_source(tmp_path / "base")
  options = {"model__path": tmp_path / "base", "model__hub_id": "them/other"}
  c = commands.config("arithmetic:grpo", **SETTINGS | LORA | options)
  params = setup.setup_run(c).initial_params()
  state = TrainState(jnp.int32(0), jnp.int32(0), params, (), history=())
  with checkpoint.Checkpoints(tmp_path / "run") as checkpoints:
    checkpoints.save(0, state)
  (tmp_path / "run/checkpoints/0/frozen/manifest.ocdbt").unlink()
  export.run(c, tmp_path / "run", tmp_path / "adapter", format="adapter")
  assert (tmp_path / "adapter/adapter_model.safetensors").exists()
  saved = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
  assert saved["base_model_name_or_path"] == str(tmp_path / "base")
  assert "base_model:" not in (tmp_path / "adapter/README.md").read_text()
  with pytest.raises(UserError, match=r"step 0 in .* is damaged \(frozen"):
    export.run(c, tmp_path / "run", tmp_path / "merged")


def our_tokens_of_base(c, workdir, tmp_path):
  export.run(c, workdir, tmp_path / "base", step=0)
  return our_tokens(tmp_path / "base")


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize(
  "family", ["Qwen3ForCausalLM", "LlamaForCausalLM", "Qwen3MoeForCausalLM"]
)
def test_peft_reads_adapters_that_we_export_and_we_read_them(family, tmp_path):
  write_source(tmp_path / "base", family)
  torch, theirs = pytest.importorskip("torch"), pytest.importorskip("peft")
  import transformers

  options = {"model__path": tmp_path / "base", "steps": 2, "data__eval": ""}
  if "Moe" in family:
    options["lora__targets"] = "q_proj,o_proj"
  c, state = trained(tmp_path / "run", **options)
  export.run(c, tmp_path / "run", tmp_path / "adapter", format="adapter")
  base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
  model = theirs.PeftModel.from_pretrained(base, tmp_path / "adapter")
  tokens = np.random.default_rng(0).integers(0, 64, (2, 9))
  with torch.no_grad():
    expected = model(torch.as_tensor(tokens)).logits.numpy()
  config = setup.setup_run(c).spec.model
  places = np.broadcast_to(np.arange(9), tokens.shape)
  hidden = transformer.forward(
    state.params, config, tokens, places, np.full_like(tokens, 9)
  )
  logits = transformer.logits(state.params, config, hidden)
  np.testing.assert_allclose(logits, expected, atol=1e-4)
  with model.disable_adapter(), torch.no_grad():
    without = model(torch.as_tensor(tokens)).logits.numpy()
  assert np.abs(without - expected).max() > 1e-2
  # Theirs is read again, and training starts from it.
  model.save_pretrained(tmp_path / "again")
  more = commands.config(
    "arithmetic:grpo",
    **SETTINGS | LORA | options | {"lora__adapter": tmp_path / "again"},
  )
  chex.assert_trees_all_equal(
    setup.setup_run(more).initial_params(), state.params
  )


def test_adapter_of_a_random_model_is_read(tmp_path):
  options = SETTINGS | LORA
  run = setup.setup_run(commands.config("arithmetic:grpo", **options))
  params = jax.tree.map(lambda x: x + 0.5, run.initial_params())
  peft.save(str(tmp_path), params, run.spec.model, "", "", "float32")
  options["lora__adapter"] = tmp_path
  more = setup.setup_run(commands.config("arithmetic:grpo", **options))
  start = more.initial_params()
  chex.assert_trees_all_equal(start[lora.KEY], params[lora.KEY])
  chex.assert_trees_all_equal(
    {**start, lora.KEY: ()}, {**run.initial_params(), lora.KEY: ()}
  )


@pytest.mark.parametrize("mesh", [(1, 4, 2), (1, 1, 8)])
def test_a_mesh_changes_no_token_and_adapters_only_by_rounding(mesh):
  options = {"lora__rank": 2, "optimizer__learning_rate": 0.05}
  want, reference = _three_steps((1, 1, 1), "grpo", **options)
  tokens, state = _three_steps(mesh, "grpo", **options)
  chex.assert_trees_all_equal(tokens, want)
  chex.assert_trees_all_close(state.params, reference.params, atol=1e-3)


def test_adapters_of_another_rank_are_rejected(tmp_path):
  params = small.params(config=MODEL)
  peft.save(str(tmp_path), params, MODEL, "base", "abc1", "float32")
  peft.check(str(tmp_path), MODEL)
  saved = json.loads((tmp_path / "adapter_config.json").read_text())
  assert saved["revision"] == "abc1"
  for wrong, message in {
    ADAPTERS._replace(rank=4): "has r=3 but config.lora.rank is 4",
    ADAPTERS._replace(targets=("q",)): "adapts .*gate_proj.*: set config.lora",
    None: "has rank 3 but config.lora.rank is 0",
  }.items():
    with pytest.raises(UserError, match=message):
      peft.check(str(tmp_path), dataclasses.replace(MODEL, lora=wrong))
  wider = dataclasses.replace(MODEL, mlp=64)
  with pytest.raises(UserError, match=r"of another model: base_model.*down"):
    peft.check(str(tmp_path), wider)
  with pytest.raises(UserError, match=r"none has no adapter_config\.json"):
    peft.check("none", MODEL)
  table = parameters.parameter_table(small.MODEL)
  with pytest.raises(
    UserError, match="has 'w', which this model lacks: use all"
  ):
    lora.choose(table, 2, 1.0, "q_proj,w")
  config = commands.config("arithmetic", lora__targets="q_proj")
  with pytest.raises(UserError, match=r"config\.lora\.rank is 0"):
    configs.validate(config)


def test_layers_of_an_adapter_are_named_as_peft_does(tmp_path):
  """Longer names, patterns and none."""
  peft.save(str(tmp_path), small.params(config=MODEL), MODEL, "", "", "float32")
  file = tmp_path / "adapter_config.json"
  saved = json.loads(file.read_text())
  long = [f"self_attn.{x}" for x in saved["target_modules"]]
  for layers in (long, r".*\.(\w+)_proj", None):
    file.write_text(json.dumps(saved | {"target_modules": layers}))
    peft.check(str(tmp_path), MODEL)


def test_adapters_of_integers_are_rejected(tmp_path):
  peft.save(str(tmp_path), small.params(config=MODEL), MODEL, "", "", "float32")
  file = tmp_path / peft.WEIGHTS
  tensors = {x: y.astype(np.int8) for x, y in stored.load_file(file).items()}
  stored.save_file(tensors, file, {"format": "pt"})
  with pytest.raises(UserError, match=r"in I8, .* use F32, BF16, F16"):
    peft.check(str(tmp_path), MODEL)


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({}, "has rank 3 but config.lora.rank is 0"),
    ({"use_dora": True}, "use_dora=True, which is not supported"),
    ({"lora_alpha": 3}, "lora_alpha=3 but config.lora.alpha is 6"),
    ({"target_modules": ["q_proj"]}, "adapts q_proj: set config.lora.targets"),
    ({"target_modules": 3}, "target_modules is 3 but must be text or a list"),
    ({"r": "3"}, "r is '3' but must be a whole number"),
  ],
)
def test_an_adapter_is_checked_before_it_is_evaluated(
  tmp_path, changes, message
):
  peft.save(str(tmp_path), small.params(config=MODEL), MODEL, "", "", "float32")
  file = tmp_path / "adapter_config.json"
  file.write_text(json.dumps(json.loads(file.read_text()) | changes))
  options = {"lora__rank": 3 * bool(changes), "lora__alpha": 6}
  options["lora__adapter"] = tmp_path
  c = commands.config("arithmetic:grpo", **SETTINGS | options)
  with pytest.raises(UserError, match=message):
    setup.setup_run(c, trains=False).initial_params()


def test_weights_of_a_run_with_adapters_are_no_start(run):
  workdir, c, _ = run
  options = SETTINGS | {"sft__from_run": workdir}
  with pytest.raises(UserError, match=r"has adapters: export it"):
    setup.setup_run(commands.config("arithmetic:grpo", **options))
  assert checkpoint.has_adapters(workdir) and c.lora.rank


def test_memory_of_fine_tuning_before_adapters_is_that_of_full_training():
  first = SETTINGS | LORA | {"reward__functions": "exact", "sft__steps": 2}
  full = first | {"lora__rank": 0}
  runs = [
    setup.setup_run(commands.config("arithmetic", **x)) for x in (first, full)
  ]
  stages, plain = map(memory.estimate, runs)
  assert stages["sft"] == plain["update"]
  assert stages["update"]["optimizer"] < plain["update"]["optimizer"]
