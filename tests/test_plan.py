"""A plan's sums are those of the arrays; the mode needs nothing but flags."""

import dataclasses
import functools
import json
import socket

import commands
import jax
import jax.numpy as jnp
import pytest

from dppo_jax import config as configs
from dppo_jax import methods, plan, sharding
from dppo_jax.algo import objectives
from dppo_jax.models import hf, kv_cache, lm_head, transformer
from dppo_jax.planning import (
  advice,
  architectures,
  assumed,
  flops,
  hardware,
  hlo,
  memory_estimate,
  seconds,
  shares,
  topology,
  traffic,
  workload,
)
from dppo_jax.records import PackedBatch
from dppo_jax.run import setup
from dppo_jax.step import programs, update

SHIPPED = ["arithmetic", "gsm8k", "qwen_math", "llama_math", "qwen3_moe_math"]
GIVEN = workload.Assumptions()


def small(**sections) -> configs.Config:
  """A small run on 4 x 2 devices; `pack__row_length=256` sets an option."""
  config = configs.Config()
  configs.use_method(config, "grpo")
  config.data.num_arithmetic = 64
  config.mesh.data, config.mesh.model = 4, 2
  for name, value in sections.items():
    section, _, field = name.partition("__")
    setattr(getattr(config, section), field, value)
  return config


@functools.cache
def planned(**sections) -> setup.Run:
  """The run of `small` on eight devices that are not looked at."""
  config = small(**sections)
  mesh = assumed.abstract_mesh(config.mesh, 8)
  return assumed.assumed_run(config, mesh, "cpu")


def bytes_on(device, tree) -> int:
  """What a device really holds."""
  return sum(
    shard.data.nbytes
    for x in jax.tree.leaves(tree)
    for shard in x.addressable_shards
    if shard.device == device
  )


# Bytes.


def test_bytes_are_those_that_a_device_holds():
  run = setup.setup_run(small())
  params = run.initial_params()
  abstract = programs.abstract_train_state(run)
  init = functools.partial(programs.init_train_state, run)
  places = jax.tree.map(lambda x: x.sharding, abstract)
  with jax.set_mesh(run.mesh):
    state = jax.jit(init, out_shardings=places)(params)
    copy = jax.jit(
      functools.partial(transformer.to_inference_params, config=run.model),
      out_shardings=jax.tree.map(
        lambda x: x.sharding, programs.abstract_inference_params(run)
      ),
    )(params)
  device = jax.devices()[0]
  held = memory_estimate.resident(planned())
  assert held["weights"] == bytes_on(device, state.params)
  assert held["optimizer"] == bytes_on(device, state.opt_state)
  assert memory_estimate.rollout_copy(planned()) == bytes_on(device, copy)


@pytest.mark.parametrize("model", [1, 2, 4])
def test_the_cache_is_that_of_the_sampler(model):
  run = planned(mesh__model=model, mesh__data=2)
  parts = memory_estimate.moments(run)["roll_out"]
  slots, capacity = workload.num_slots(run), workload.capacity(run)
  sizes = kv_cache.part_sizes(capacity)
  with jax.sharding.use_abstract_mesh(run.mesh):
    cache = jax.eval_shape(lambda: kv_cache.init(run.model, slots, sizes))
  whole = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache))
  assert parts["cache"] == whole / model


def test_a_reference_policy_is_counted():
  run = planned()
  objective = run.objective._replace(beta=0.1)
  held = memory_estimate.resident(run._replace(objective=objective))
  assert held["reference"] == held["weights"]


@pytest.mark.parametrize(
  "moment, smaller, larger",
  [
    ("roll_out", {"rollout__num_slots": 8}, {"rollout__num_slots": 32}),
    ("roll_out", {"rollout__max_tokens": 32}, {"rollout__max_tokens": 64}),
    ("update", {"pack__rows_per_micro": 2}, {"pack__rows_per_micro": 8}),
    ("update", {"model__remat": "layers"}, {"model__remat": "dots"}),
    ("update", {"model__remat": "dots"}, {"model__remat": "none"}),
    ("update", {"mesh__data": 4}, {"mesh__data": 2}),
    ("to_inference_params", {"mesh__model": 2}, {"mesh__model": 1}),
  ],
)
def test_more_takes_more(moment, smaller, larger):
  sums = [
    sum(memory_estimate.moments(planned(**x))[moment].values())
    for x in (smaller, larger)
  ]
  assert sums[0] < sums[1]


# Operations and seconds.


def test_operations_are_those_that_xla_counts_in_an_update():
  """Of one row without padding, in one block of attention and of logits."""
  model = transformer.ModelConfig(
    *(512, 64, 4, 4, 2, 16, 192), has_qk_norm=True, remat="none"
  )
  length = 64
  row = lambda dtype: jnp.ones((1, length), dtype)
  config = update.UpdateConfig(model, objectives.grpo(), logit_chunk=length)
  batch = PackedBatch(
    **{
      field.name: row(bool if field.name == "is_trained" else jnp.int32)
      if field.name in ("tokens", "targets", "positions", "segment_ids")
      or field.name in ("prefix_ids", "prompts", "is_trained")
      else row(jnp.float32)
      for field in dataclasses.fields(PackedBatch)
    }
  )
  params = jax.eval_shape(
    functools.partial(transformer.init, model), jax.random.key(0)
  )
  sums = jax.eval_shape(lambda p: update.zero_sums(p, model), params)
  add = lambda sums, params, rows: update.add_gradient(
    sums, params, None, config, rows
  )
  cost = jax.jit(add).lower(sums, params, batch).compile().cost_analysis()
  passes = flops.linear(model, length) + flops.head(model, length)
  # Blocks are multiplied whole; their logits once more in the backward pass.
  passes += flops.attention(model, length * length)
  ratio = cost["flops"] / (3 * passes)
  assert 0.95 < ratio < 1.25, ratio


def test_experts_that_a_token_does_not_go_through_are_not_counted():
  settings = architectures.KNOWN["Qwen/Qwen3-30B-A3B"]
  model = hf.families.from_settings(settings)
  active = model.layers * flops.layer_weights(model) + 2 * (
    model.vocab * model.embed
  )
  assert transformer.num_parameters(model) == pytest.approx(30.5e9, rel=0.01)
  assert active == pytest.approx(3.3e9, rel=0.03)


def _step(given=GIVEN, kind="v5e", **sections) -> dict[str, seconds.Phase]:
  run = planned(**sections)
  work = workload.of_step(run, given)
  return seconds.phases(run, work, hardware.CHIPS[kind], given)


def test_fewer_completions_shorten_the_update_alone():
  given = dataclasses.replace(GIVEN, completion=48, completions_kept=1.0)
  data = {"data__prompts_per_step": 48}
  whole = _step(given, **data)
  half = _step(dataclasses.replace(given, completions_kept=0.25), **data)
  assert half["update"].flops < 0.5 * whole["update"].flops
  assert half["decode"] == whole["decode"]


def test_mini_batches_are_scored_packed_and_applied_one_by_one():
  data = {"data__prompts_per_step": 48}
  whole = _step(**data)
  parts = _step(**data, objective__mini_batches=16)
  assert "score" in parts and "score" not in whole
  # Each takes a micro-batch at least, and reads and writes the whole state.
  assert parts["update"].flops > 2 * whole["update"].flops
  assert parts["update"].read > 2 * whole["update"].read
  assert parts["decode"] == whole["decode"]


def test_longer_completions_take_longer_everywhere():
  short = _step(dataclasses.replace(GIVEN, completion=16))
  long = _step(dataclasses.replace(GIVEN, completion=60))
  assert seconds.total(short) < seconds.total(long)
  assert short["decode"].flops < long["decode"].flops


def test_the_slowest_resource_is_what_a_phase_waits_for():
  given = dataclasses.replace(GIVEN, compute=1, bandwidth=1, network=1)
  chip = hardware.CHIPS["v5p"]
  for phase in _step(given, kind="v5p").values():
    waits = {
      "compute": phase.flops / chip.flops,
      "memory": phase.read / chip.bandwidth,
      "network": phase.received / chip.network,
    }
    assert phase.seconds == pytest.approx(max(waits.values()))
    assert waits[phase.bound] == max(waits.values())


@pytest.mark.parametrize(
  "method, prompts, completions",
  [
    (methods.grpo(), 1.0, 1.0),
    (methods.neyman(0.75, 0.25), 0.75, 0.25),
    (methods.pods(0.5), 1.0, 0.5),
  ],
)
def test_shares_are_those_that_a_method_is_asked_for(
  method, prompts, completions
):
  found = shares.try_out(method, objectives.grpo(), 8, 0.0)
  is_mixed = shares.try_out(methods.grpo(), objectives.grpo(), 8, 0.0).mixed
  assert found.prompts == pytest.approx(prompts, abs=0.01)
  # Those of zero advantage are left out whatever the method.
  assert found.completions <= completions
  assert found.completions >= 0.9 * min(completions, is_mixed) * is_mixed


def test_shares_that_set_themselves_go_by_the_update_that_is_assumed():
  tried = lambda cost: shares.try_out(
    methods.neyman(), objectives.grpo(), 8, 0.7, update_cost=cost
  )
  cheap, dear = tried(0.01), tried(5.0)
  assert cheap.completions > 2 * dear.completions > 0
  # What is believed of prompts has to promise a fifth of the time.
  assert cheap.prompts == 1.0


# Traffic.


def test_what_the_rollouts_weights_bring_is_what_the_compiler_gathers():
  run = setup.setup_run(small())
  with jax.sharding.use_abstract_mesh(run.mesh.abstract_mesh):
    program = programs.programs(run)["to_inference_params"]
    text = program.lower().compile().as_text()
  found = hlo.collectives(text)
  # Norms and the like, which no axis divides, are not gathered.
  table = transformer.parameter_table(run.model)
  whole = sum(
    p.shape[0] * p.shape[-1]
    for p in table.values()
    if not any(axis in ("embed", "mlp", "heads") for axis in p.axes)
  )
  gathered = sum(x.bytes for x in found if x.kind == "all-gather")
  expected = traffic.weights_of_rollout(run)
  assert expected - 4 * whole <= gathered <= expected


def test_loops_and_branches_are_multiplied_out():
  in_fours = "replica_groups=[1,4]<=[4]"
  listed = "replica_groups={{0,1,2,3}}"
  on_b = "replica_groups=mesh['a'=2,'b'=4] {'b'}"
  scattered = f"reduce-scatter(%z), channel_id=3, {on_b}, to_apply=%add"
  turns = 'backend_config={"known_trip_count":{"n":"5"}}'
  text = f"""HloModule example

%body (p: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {{
  %x = f32[2,4]{{1,0}} parameter(0)
  %g = f32[8,4]{{1,0}} all-gather(%x), channel_id=1, {listed}
}}

%inner (p: (s32[])) -> (s32[]) {{
  %r = bf16[16]{{0}} all-reduce(%y), channel_id=2, {in_fours}, to_apply=%add
}}

%cond (p: (s32[])) -> pred[] {{
  %q = s32[] parameter(0)
}}

%below (p: (s32[], f32[4])) -> pred[] {{
  %eight = u32[]{{:T(128)}} constant(8)
  %get-tuple-element.1 = u32[] get-tuple-element(%p), index=1
  ROOT %lt = pred[] compare(%get-tuple-element.1, %eight), direction=LT
}}

%by_two (p: (s32[], u32[])) -> (s32[], u32[]) {{
  %get-tuple-element.2 = u32[] get-tuple-element(%p), index=1
  %two = u32[] constant(2)
  %a = f32[4]{{0}} collective-permute(%x), source_target_pairs={{listed}}
  %kernel = f32[4]{{0}} custom-call(%a), custom_call_target="other", text="{{
}}}}", metadata={{}}
  %b = f32[4]{{0}} collective-permute(%x), source_target_pairs={{listed}}
  %next = u32[] add(%get-tuple-element.2, %two)
  ROOT %t = (s32[], /*index=1*/u32[]) tuple(%y, /*index=1*/%next)
}}

ENTRY %main (p: f32[8,4]) -> f32[8,4] {{
  %c = (s32[], u32[]) while(%t), condition=%below, body=%by_two
  %w = (s32[], f32[8,4]) while(%t), condition=%cond, body=%body, {turns}
  %v = (s32[]) while(%u), condition=%cond, body=%inner
  %s = f32[4]{{0}} {scattered}
  %k.3 = f32[4]{{0}} custom-call(%s), custom_call_target="tpu_custom_call"
}}
"""
  assert sorted(hlo.collectives(text)) == [
    ("all-gather", 0, 5 * 128 * 3 / 4),
    ("all-reduce", 1, 2 * 32 * 3 / 4),
    ("collective-permute", 0, 4 * (16 + 16)),
    ("reduce-scatter", 0, 16 * 3),
  ]
  assert hlo.kernels(text) == {"k": 1}


# The mode.


@pytest.fixture
def no_network(monkeypatch):
  def refuse(*args, **kwargs):
    raise AssertionError("a plan asked the network")

  monkeypatch.setattr(socket, "getaddrinfo", refuse)
  monkeypatch.setattr(hf, "fetch", refuse)


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_config_is_planned_from_nothing(
  name, no_network, tmp_path, capsys
):
  config = commands.config(name)
  plan.run(config, tmp_path, on="v5p:16,h200:8")
  printed = capsys.readouterr().out
  assert "v5p:16" in printed and "dppo takes" in printed
  (path,) = (tmp_path / "plan").glob("*.json")
  found = json.loads(path.read_text())["plans"]["h200:8"]
  assert found["change"] is None  # it fits
  assert sum(found["memory"]["update"].values()) < found["usable"]
  assert path.with_suffix(".md").read_text().startswith("# Plan of dppo")


def test_a_config_says_how_many_devices_it_takes(no_network, capsys):
  found = plan.run(commands.config("qwen_math"))["devices"]
  assert 1 == found["h200"] <= found["v5p"] <= found["v5e"] <= 8
  assert "devices" in capsys.readouterr().out


def test_what_does_not_fit_comes_with_what_would(no_network, capsys):
  options = {"model__hub_id": "Qwen/Qwen3-4B", "mesh__model": 2}
  config = commands.config("qwen_math", **options)
  found = plan.run(config, on="v5e:16")["plans"]["v5e:16"]
  printed = " ".join(capsys.readouterr().out.split())
  assert "Does not fit: roll_out" in printed
  assert "By sums --config.rollout.num_slots=" in printed
  assert found["change"]["rollout.num_slots"] < config.rollout.num_slots
  config.rollout.num_slots = found["change"]["rollout.num_slots"]
  where = hardware.parse("v5e:16")
  assert max(advice.sums(config, where).values()) <= where.memory


def test_a_checkpoint_needs_only_its_config_json(tmp_path, no_network):
  settings = architectures.KNOWN["Qwen/Qwen3-8B"]
  (tmp_path / "config.json").write_text(json.dumps(settings))
  options = {"model__path": str(tmp_path)}
  found = plan.run(commands.config("qwen_math", **options), on="h200:8")
  weights = found["plans"]["h200:8"]["memory"]["update"]["weights"]
  assert weights == pytest.approx(4 * 8.19e9 / 8, rel=0.01)


@pytest.mark.parametrize(
  "options, words",
  [
    ({"on": "b200:8"}, "--hardware is 'b200:8' but must be KIND"),
    ({"on": "h200:0"}, "must be a number of devices"),
    ({"shape": "v5e:0x4"}, "--topology is 'v5e:0x4' but"),
    ({"shape": "h200:4x4"}, "only TPUs have topologies"),
    ({"assume": "completion"}, "--assume=completion is '' but"),
    ({"assume": "length=3"}, "--assume has 'length' but"),
    ({"assume": "compute=1.5"}, "at most 1"),
    ({"assume": "completion=inf"}, "must be a number"),
  ],
)
def test_what_cannot_be_planned_is_refused(options, words):
  with pytest.raises(ValueError, match=words):
    plan.run(small(), **options)


def test_an_unknown_model_and_too_few_devices_are_refused():
  config = commands.config("qwen_math", model__hub_id="some/model")
  with pytest.raises(ValueError, match=r"--config\.model\.path=DIR"):
    plan.run(config, on="h200:8")
  with pytest.raises(ValueError, match=r"a mesh of 4 x 2 needs 8 devices"):
    plan.run(small(), on="h200:4")
  with pytest.raises(ValueError, match=r"config\.pack\.row_length"):
    plan.run(commands.config("gsm8k", pack__row_length=256), on="h200:1")


def test_the_command_line_plans():
  done = commands.main("gsm8k:cppo", "--mode=plan", "--hardware=h200")
  assert done.returncode == 0, done.stderr
  assert "cppo takes" in done.stdout
  refused = commands.main("gsm8k", "--hardware=h200")
  assert refused.stderr == "error: --hardware is for --mode=plan\n"


def test_without_the_compiler_a_line_says_how_to_get_it(monkeypatch, capsys):
  monkeypatch.setattr(topology, "is_installed", lambda: False)
  plan.run(small(mesh__data=2), shape="v5e:2x2")
  printed = " ".join(capsys.readouterr().out.split())
  assert "pip install 'dppo_jax[tpu]'" in printed


# The compiler for TPUs, where it is installed.


def test_stages_are_compiled_for_a_topology(capsys):
  pytest.importorskip("libtpu")
  config = small(mesh__data=2, eval__prompts=4)
  stages = "to_inference_params,update_history"
  found = plan.run(config, shape="v5e:2x2", stages=stages)["compiled"]
  of = found["stages"]["to_inference_params"]
  assert of["held"] > 0 and not of["error"]
  assert "Fits, says the compiler" in capsys.readouterr().out
  with pytest.raises(ValueError, match="--stages has 'train'"):
    plan.run(config, shape="v5e:2x2", stages="train")
  with pytest.raises(ValueError, match="--topology is 'v5e:3x5'"):
    plan.run(config, shape="v5e:3x5")


def test_experts_and_a_head_of_its_own_compile(tmp_path):
  """Each was refused by the TPU compiler once, by no other."""
  pytest.importorskip("libtpu")
  shape = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_hidden_layers": 4,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 2048,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "norm_topk_prob": True,
  }
  (tmp_path / "config.json").write_text(json.dumps(shape))
  config = commands.config(
    "qwen3_moe_math",
    model__hub_id="",
    model__path=str(tmp_path),
    mesh__model=2,
    data__prompts_per_step=8,
    data__max_prompt_tokens=128,
    rollout__max_tokens=128,
    rollout__num_slots=16,
    pack__row_length=512,
  )
  stages = plan.run(config, shape="v5e:2x2", stages="update,roll_out")
  stages = stages["compiled"]["stages"]
  assert not any(stage["error"] for stage in stages.values())
  assert {"update", "roll_out"} <= stages.keys()


def test_the_head_is_gathered_once_and_not_for_every_chunk_of_logits():
  pytest.importorskip("libtpu")
  devices = topology.devices(hardware.parse("v5e:2x2"))
  mesh = sharding.make_mesh(data=4, devices=devices)
  by_row = sharding.sharding(mesh, "batch")
  by_width = sharding.sharding(mesh, "vocab", "embed")
  array = lambda shape, dtype, place: jax.ShapeDtypeStruct(
    shape, dtype, sharding=place
  )

  def loss(hidden, head, targets, is_needed):
    arrays = (hidden, head, targets, is_needed)
    return lm_head.token_logprobs(*arrays, 0.7, logit_chunk=128).sum()

  gradient = jax.jit(jax.grad(loss, (0, 1)), out_shardings=(by_row, by_width))
  with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
    program = gradient.lower(
      array((4, 256, 128), jnp.float32, by_row),
      array((1024, 128), jnp.float32, by_width),
      array((4, 256), jnp.int32, by_row),
      array((4, 256), bool, by_row),
    ).compile()
  found = hlo.collectives(program.as_text())
  assert found and all(x.depth == 0 for x in found), found


def test_a_refusal_of_the_compiler_is_a_figure():
  message = "Ran out of memory in memory space hbm. Used 20.80G of 15.75G hbm."
  assert topology._needed(message) == pytest.approx(20.8 * 2**30)
  assert topology._needed("something else") == 0
