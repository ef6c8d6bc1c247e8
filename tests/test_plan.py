"""Plan mode needs nothing but flags; compilers need no device."""

import functools
import importlib.util
import json
import re
import shlex
import socket

import jax
import jax.numpy as jnp
import pytest

from dppo_jax import plan, sharding
from dppo_jax.errors import UserError
from dppo_jax.models import attention, hf, lm_head
from dppo_jax.planning import assumed, targets
from dppo_jax.planning.collectives import read_collectives
from tests.helpers import commands

SHIPPED = {
  "arithmetic": "v5e:1",
  "gsm8k": "v5e:2x4",
  "gemma_gsm8k": "v5e:2x4",
  "qwen_math": "v5e:4x4",
  "llama_math": "v5e:4x4",
  "qwen3_moe_math": "v5p:2x2x4",
}


@pytest.fixture
def no_network(monkeypatch):
  def fail(*args, **kwargs):
    raise AssertionError("plan mode used the network")

  monkeypatch.setattr(socket, "getaddrinfo", fail)
  monkeypatch.setattr(hf, "fetch", fail)


@pytest.mark.parametrize("name, slice_name", SHIPPED.items())
def test_every_shipped_config_fits_its_slice(
  name, slice_name, no_network, capsys
):
  hardware = f"{slice_name},h200:8"
  values = plan.run(commands.config(name), hardware=hardware)["estimated"]
  assert values.keys() == {slice_name, "h200:8"}
  printed = capsys.readouterr().out
  assert "Does not fit" not in printed and printed.count("Fits: ") == 2
  assert printed.count("Rollouts take ") == 2
  assert not [x for x in printed.splitlines() if len(x) > 80]


def test_kernels_are_those_of_the_planned_gpu(no_network, capsys, monkeypatch):
  """An A100 has none; tokamax need not be installed here."""
  monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
  plan.run(commands.config("gsm8k"), hardware="a100:8,h200:8,b200:8")
  printed = capsys.readouterr().out
  chosen = re.findall(r"attention: (\w+)", printed)
  assert chosen == ["xla_dense", "tokamax", "tokamax"]
  why = "plain XLA: tokamax needs compute capability 9 or 10, not 8.0"
  assert why in " ".join(printed.split())


def test_plan_mode_allocates_no_arrays(no_network):
  before = {id(x) for x in jax.live_arrays()}
  plan.run(commands.config("qwen3_moe_math"), hardware="h200:8")
  arrays = [x for x in jax.live_arrays() if id(x) not in before]
  assert sum(x.nbytes for x in arrays) < 1000


def test_runs_that_do_not_fit_are_named(no_network, capsys):
  options = {"model__hub_id": "Qwen/Qwen3-4B", "mesh__model": 2}
  options["rollout__num_slots"] = 64
  plan.run(commands.config("qwen_math", **options), hardware="v5e:16")
  printed = " ".join(capsys.readouterr().out.split())
  assert "Does not fit: roll_out needs" in printed
  assert "lower config.rollout.num_slots" in printed


def test_a_checkpoint_needs_only_its_config_json(tmp_path, no_network):
  settings = assumed.known_models()["Qwen/Qwen3-8B"]
  (tmp_path / "config.json").write_text(json.dumps(settings))
  config = commands.config("qwen_math", model__path=str(tmp_path))
  values = plan.run(config, hardware="h200:8")["estimated"]["h200:8"]
  weights = values["update"]["weights"]
  assert weights == pytest.approx(4 * 8.19e9 / 8, rel=0.01)


@pytest.mark.parametrize(
  "options, words",
  [
    ({}, "needs --hardware"),
    ({"hardware": "cpu", "stages": "update"}, "--stages=update needs --topol"),
    ({"hardware": "b100:8"}, "--hardware is 'b100:8' but must be KIND"),
    ({"hardware": "h200:0"}, "--hardware is 'h200:0' but"),
    ({"topology": "v5e:0x4"}, "--topology is 'v5e:0x4' but"),
    ({"hardware": "v5e:1", "pack__row_length": 256}, "config.pack.row_length"),
    ({"hardware": "v5e:1", "model__hub_id": "a/b"}, "set config.model.path"),
    ({"hardware": "v5e:4", "mesh__model": 8}, "1 x 8 needs 8 devices"),
    ({"hardware": "v5e", "assume": "tokens=3"}, "with NAME one of prompt, com"),
    ({"hardware": "v5e", "assume": "prompt"}, "--assume is 'prompt' but must"),
    ({"hardware": "v5e", "assume": "prompt=0"}, "--assume is 'prompt=0' but"),
    ({"hardware": "v5e", "assume": "memory=2"}, "fractions are at most 1"),
    ({"topology": "cpu"}, "--topology is 'cpu' but must be KIND"),
    ({"topology": "v5e"}, "--topology is 'v5e' but must be KIND"),
    ({"topology": "v5e:8"}, "--topology is 'v5e:8' but must be"),
    ({"hardware": "v5e", "checkpoint__best": "eval/x"}, "must be one of eval/"),
    ({"hardware": "v5e", "price_per_hour": -1.0}, "--price_per_hour is -1.0"),
  ],
)
def test_invalid_plans_are_rejected(options, words):
  flags = {name: x for name, x in options.items() if "__" not in name}
  changed = {name: x for name, x in options.items() if "__" in name}
  with pytest.raises(ValueError, match=words):
    plan.run(commands.config("gsm8k", **changed), **flags)


def test_evaluations_and_checkpoints_are_those_of_the_run():
  c = commands.config("arithmetic", steps=20)
  for every, num in ((0, 2), (10, 3), (15, 3)):
    c.eval.every = every
    assert plan.num_evaluations(c) == num
  none = commands.config("arithmetic", steps=0, eval__every=0)
  assert plan.num_evaluations(none) == 1
  for every, keep, best, num in ((30, 2, "", 1), (5, 2, "", 2), (5, 2, "x", 3)):
    c.checkpoint.every, c.checkpoint.keep, c.checkpoint.best = every, keep, best
    assert plan.num_checkpoints(c) == num


def test_the_command_line_plans():
  flags = ["--hardware=h200:1", "--price_per_hour=60", "--assume=trained=0.5"]
  done = commands.main("gsm8k:cppo", "--mode=plan", *flags)
  assert done.returncode == 0, done.stderr
  assert "optimizer" in done.stdout and "Fits: " in done.stdout
  assert "trained=0.50" in done.stdout
  minutes, cost = (
    float(re.search(rf"^{name} +([\d.]+)", done.stdout, re.M)[1])
    for name in ("time", "cost")
  )
  assert cost == pytest.approx(minutes, abs=0.06)


def test_the_page_shows_what_the_plan_prints():
  page = (commands.ROOT / "configs" / "QUESTIONS.md").read_text("utf-8")
  command = re.search(r"python -m dppo_jax.main (--mode=plan [^`]*)", page)[1]
  shown = page[page.index(command) :].split("```text\n")[1].split("```")[0]
  words = shlex.split(command.replace("\\\n", " "))
  assert shown in commands.command(*words).stdout


def test_collectives_are_read_from_a_program():
  name = 'metadata={op_name="jit(f)/while/body/while/body/dot"}'
  text = f"""
  %g.1 = f32[8,4]{{1,0}} all-gather(%x), channel_id=1, {name}
  %g.2 = (f32[2,4], f32[8,4]) all-gather-start(%x), channel_id=1, {name}
  %g.3 = bf16[16]{{0}} all-gather(%y), channel_id=2, {name}
  ROOT %r = (f32[4], bf16[2]) all-reduce(%z, %z), channel_id=3
  %s = (f32[8], f32[4]) all-reduce-start(%z, %z), channel_id=4
  %t = ((f32[2], f32[3]), (f32[4], f32[6])) all-gather-start(%z), channel_id=5
"""
  assert read_collectives(text) == [
    ("all-gather", 2, 2, 128 + 32),
    ("all-reduce", -1, 2, 20 + 48),
    ("all-gather", -1, 1, 40),
  ]


# Compilers, if they are installed.


@pytest.mark.slow
@pytest.mark.parametrize(
  "module, name", [("libtpu", "v5e:2x2"), ("jax_cuda13_plugin", "h200:4")]
)
def test_stages_are_compiled_for_a_topology(module, name, capsys):
  pytest.importorskip(module)
  config = commands.config("arithmetic", mesh__data=4)
  stages = "to_inference_params,update_history"
  compiled = plan.run(config, topology=name, stages=stages)["compiled"]
  assert compiled.keys() == set(stages.split(","))
  assert compiled["to_inference_params"]["held"] > 0
  assert "Compiled for" in capsys.readouterr().out
  with pytest.raises(UserError, match="--stages has 'train'"):
    plan.run(config, topology=name, stages="train")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_decode_kernel_compiles_for_tpus(dtype):
  """To one kernel, which updates the donated cache in place."""
  pytest.importorskip("libtpu")
  mesh = sharding.make_mesh(devices=targets.devices(targets.parse("v5e:1x1")))
  place = sharding.sharding(mesh)
  array = lambda *shape, dtype=dtype: jax.ShapeDtypeStruct(
    shape, dtype, sharding=place
  )
  kv, number = array(8, 2, 128), functools.partial(array, dtype=jnp.int32)
  cache, prompts = (array(2, 8, 2, x, 128) for x in (256, 128))
  program = jax.jit(
    attention.decode_kernel.attend, out_shardings=place, donate_argnums=3
  ).trace(
    *(array(8, 16, 128), kv, kv, (cache, cache), (prompts, prompts)),
    *(number(), *[number(8)] * 4),
  )
  compiled = program.lower(lowering_platforms=("tpu",)).compile()
  assert compiled.as_text().count("custom-call(") == 1
  assert compiled.memory_analysis().temp_size_in_bytes < cache.size


@pytest.mark.slow
def test_experts_and_an_untied_head_compile_for_tpus(tmp_path):
  """Only the TPU compiler once rejected each."""
  pytest.importorskip("libtpu")
  settings = assumed.known_models()["Qwen/Qwen3-30B-A3B"] | {
    "num_hidden_layers": 4,
    "hidden_size": 256,
    "num_attention_heads": 8,
    "vocab_size": 2048,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
  }
  (tmp_path / "config.json").write_text(json.dumps(settings))
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
  stages = plan.run(config, topology="v5e:2x2", stages="update,roll_out")
  assert not any(x["error"] for x in stages["compiled"].values())
  assert stages["compiled"].keys() == {"update", "roll_out"}


def test_the_head_is_gathered_once_and_not_for_every_chunk_of_logits():
  pytest.importorskip("libtpu")
  devices = targets.devices(targets.parse("v5e:2x2"))
  mesh = sharding.make_mesh(data=4, devices=devices)
  by_row = sharding.sharding(mesh, "batch")
  by_width = sharding.sharding(mesh, "vocab", "embed")
  array = lambda shape, dtype, place: jax.ShapeDtypeStruct(
    shape, dtype, sharding=place
  )

  def loss(hidden, head, targets, is_needed):
    arrays = (hidden, head, targets, is_needed)
    return lm_head.logprobs_and_entropy(*arrays, 0.7, 128)[0].sum()

  gradient = jax.jit(jax.grad(loss, (0, 1)), out_shardings=(by_row, by_width))
  with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
    program = gradient.lower(
      array((4, 256, 128), jnp.float32, by_row),
      array((1024, 128), jnp.float32, by_width),
      array((4, 256), jnp.int32, by_row),
      array((4, 256), bool, by_row),
    ).compile()
  collectives = read_collectives(program.as_text())
  assert collectives and all(x.depth == 0 for x in collectives), collectives
