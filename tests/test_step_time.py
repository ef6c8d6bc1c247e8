"""The estimate of seconds, hours and disk, against counts made otherwise."""

import dataclasses
import itertools
import math
import pathlib
import re

import jax
import jax.numpy as jnp
import pytest

from dppo_jax import plan
from dppo_jax.errors import UserError
from dppo_jax.models import parameters, transformer
from dppo_jax.planning import assumed, flops, memory, step_time, targets
from dppo_jax.run.setup import Run
from tests.helpers import commands

UNIT = {
  "products": 1,
  "memory": 1,
  "flops": 1e9,
  "bandwidth": 1e9,
  "experts": 8,
}


def planned(
  file: str = "gsm8k", devices: int = 1, platform: str = "gpu", **options
) -> Run:
  config = commands.config(file, **options)
  mesh = assumed.abstract_mesh(config.mesh, devices)
  return assumed.assumed_run(config, mesh, platform)


def seconds(run: Run, **changes) -> dict[str, float]:
  hardware = targets.parse(f"h100:{run.spec.mesh.size}")
  basis = step_time.assume(run, hardware)._replace(**(UNIT | changes))
  return step_time.estimate(run, memory.estimate(run), basis)


@pytest.mark.parametrize(
  "changes, slower",
  [
    ({"completion": 500}, "rollout update"),
    ({"prompt": 500}, "update"),  # slots of a GPU hold the longest prompt
    ({"trained": 1}, "update"),
    ({"groups": 1}, "update"),
    ({"products": 0.5}, "rollout update"),
    ({"bandwidth": 5e8}, "rollout update"),
  ],
)
def test_stages_take_longer(changes, slower):
  run = planned()
  before, after = seconds(run), seconds(run, **changes)
  assert {x for x in before if after[x] > before[x]} == set(slower.split())
  assert all(after[x] >= before[x] for x in before)


def test_operations_of_a_forward_pass_are_the_compilers():
  """Attention between all pairs, which `xla_dense` computes."""
  model = planned("arithmetic", 1, "cpu", model__shape__layers=1).spec.model
  model = dataclasses.replace(model, attention="xla_dense")
  params = jax.eval_shape(lambda: parameters.init(model, jax.random.key(0)))
  ids = jax.ShapeDtypeStruct((1, 256), jnp.int32)

  def forward(params, ids):
    hidden = transformer.forward(params, model, ids, ids, ids)
    return transformer.logits(params, model, hidden)

  cost = jax.jit(forward).lower(params, ids).compile().cost_analysis()
  expected = flops.forward(model, 256, 256, pairs=256**2)
  assert cost["flops"] == pytest.approx(expected, rel=0.15)


def test_an_update_reads_a_prompt_once_for_its_group():
  """Micro-batches are those of G completions and one prompt a group."""
  options = {"data__prompts_per_step": 64, "rollout__group_size": 8}
  run = planned(model__remat="none", **options)
  lean = {"bandwidth": 1e30, "completion": 64, "trained": 0.5, "groups": 0.5}
  update = [seconds(run, prompt=x, **lean)["update"] for x in (1e-6, 128)]
  more = 32 * 128 / step_time._FILL
  pairs = 32 * 128 * (8 * 64 + 128 / 2)
  expected = 3 * flops.forward(run.spec.model, more, pairs=pairs) / 1e9
  assert update[1] - update[0] == pytest.approx(expected, rel=1e-3)


def test_adapters_save_no_pass_of_an_update():
  full, lora = (
    seconds(planned("gsm8k", lora__rank=x), bandwidth=1e30)["update"]
    for x in (0, 1)
  )
  assert lora == pytest.approx(full)


def test_without_kernels_a_gpu_multiplies_with_every_expert():
  """In decoding of few tokens with or without kernels."""
  few, many = (
    planned("qwen3_moe_math", 4, rollout__num_slots=x) for x in (256, 257)
  )
  some = lambda run, **more: seconds(run, bandwidth=1e30, **more)
  assert some(many, experts=128)["rollout"] > 5 * some(many)["rollout"]
  assert some(few)["rollout"] > 5 * some(many)["rollout"]
  assert some(few, experts=128)["update"] > 5 * some(few)["update"]
  basis = lambda x: step_time.assume(few, targets.parse(x)).experts
  assert basis("a100:8") == 8 * 128 and basis("v5e:8") == 8


@pytest.mark.parametrize(
  "options, trained",
  [
    ({"rollout__group_size": 4}, 3 / 5),
    ({"rollout__group_size": 8}, 7 / 9),
    ({"objective__args__beta": 0.1}, 1),
  ],
)
def test_completions_without_a_gradient_are_not_trained_on(options, trained):
  basis = step_time.assume(planned(**options), targets.parse("h100"))
  assert basis.trained == pytest.approx(trained)


@pytest.mark.parametrize(
  "changes, groups", [("", 7 / 9), ("trained=0.5", 7 / 9), ("trained=0.9", 0.9)]
)
def test_completions_are_of_at_least_as_many_groups(changes, groups):
  """Fewer completions keep the prompts of all groups with a gradient."""
  run = planned(rollout__group_size=8)
  basis = step_time.assume(run, targets.parse("h100"), changes)
  assert basis.groups == pytest.approx(groups)


def test_completions_are_at_most_as_long_as_the_limit():
  run = planned(rollout__max_tokens=100)
  with pytest.raises(
    UserError, match=r"of 101 tokens, but .*max_tokens allows 100"
  ):
    step_time.assume(run, targets.parse("h100"), "completion=101")


def test_tokens_by_their_place_need_no_forward_pass():
  run = planned("gsm8k:neyman", method__args__token_budget=0.5)
  assert run.spec.method.tokens and not seconds(run)["score"]


def test_devices_divide_the_work():
  options = {"rollout__num_slots": 8, "pack__rows_per_micro": 1}
  options |= {"data__prompts_per_step": 512}
  one, eight = (seconds(planned(devices=n, **options)) for n in (1, 8))
  for stage in ("rollout", "update"):
    assert 6 < one[stage] / eight[stage] < 8.5


def test_score_takes_a_forward_pass():
  run = planned(objective__inner_updates=2, rollout__top_k=5)
  stages = seconds(run, bandwidth=1e30)
  assert stages["score"] == pytest.approx(stages["update"] / 4)
  assert not seconds(planned())["score"]


def test_evaluations_are_counted():
  """Sampled at 0, 10 and 20 of 20 steps, greedily at the first and the last."""
  options = {"steps": 20, "data__eval_limit": 96}
  basis = step_time.assume(planned(), targets.parse("h100"))
  spent = lambda num, **more: step_time.evaluation_seconds(
    run := planned(**options, **more), num, memory.estimate(run), basis
  )
  once = spent(2, eval__samples=0)
  assert spent(3, eval__samples=0) == pytest.approx(1.5 * once)
  assert spent(3, eval__samples=1) == pytest.approx(2.5 * once)
  two, three = (spent(x, eval__samples=8) - once for x in (2, 3))
  assert three == pytest.approx(1.5 * two)  # the greedy ones have no samples
  three = spent(2, eval__samples=0, data__eval="a=a,b=b,c=c")
  assert three == pytest.approx(3 * once)


@pytest.mark.parametrize("rank", [0, 8])
def test_checkpoints_have_weights_and_two_moments(rank):
  run = planned(devices=4, lora__rank=rank)
  model = run.spec.model
  num = parameters.num_parameters(model)
  adapters = parameters.trainable_table(model).values()
  trained = sum(math.prod(x.shape) for x in adapters)
  first, *later = step_time.checkpoint_sizes(run.spec, 2)
  frozen = 2 * num if rank else 0
  assert first == frozen + 4 * trained
  assert len(later) == 2
  assert later[0] == pytest.approx(12 * trained, rel=1e-4)


def test_bandwidths_are_those_of_the_compilers_descriptions():
  folder = pathlib.Path(assumed.__file__).parent
  for path in folder.glob("*.txtpb"):
    text = re.search(r"memory_bandwidth: (\d+)", path.read_text())[1]
    bandwidth = targets.parse(path.stem).peaks[1]
    assert bandwidth == pytest.approx(float(text), rel=1e-3)


def test_this_machine_is_measured(monkeypatch, capsys):
  monkeypatch.setattr(step_time, "ceilings", lambda dtype: (2e11, 5e10))
  monkeypatch.setattr(memory, "free_memory", lambda: 3 * 2**30)
  plan.run(commands.config("arithmetic"), hardware="cpu")
  printed = capsys.readouterr().out
  assert "of 3.00 GiB" in printed
  assert "products=0.36 of 0.2 TFLOP/s, memory=0.33 of 50 GB/s" in printed


def test_ceilings_follow_the_clock():
  ticks = itertools.count()
  rate, bandwidth = step_time.ceilings("float32", lambda: next(ticks), 1)
  assert rate == 2 * 2048**3 and bandwidth == 2 * 2**28


@pytest.mark.parametrize(
  "update, words",
  [
    (1.0, "at most 1.10 even if the update were free. It pays from"),
    (9.0, "most 1.90"),
  ],
)
def test_the_most_that_pruning_gains(update, words):
  text = plan._advice({"rollout": 8.0, "update": update, "rest": 2.0})
  assert words in text and ("use grpo" in text) == (update == 1.0)
