"""The loop: resume equals uninterrupted, sharded equals unsharded."""

import json
import signal

import jax
import numpy as np
import pytest

from dppo_jax import checkpoint, config, data, house, keys, rooms, train
from dppo_jax.keys import Room


def _config(**overrides) -> config.Config:
  """A model that knows next to nothing, on problems of one operation."""
  c = config.Config()
  config.use_method(c, overrides.pop("method", "dppo"))
  settings = {
    "steps": 4,
    "model.embed": 16,
    "model.mlp": 32,
    "model.head_dim": 8,
    "data.num_arithmetic": 20,  # an epoch of two steps
    "data.max_operations": 1,
    "data.prompts_per_step": 8,
    "data.eval_limit": 8,
    "rollout.group_size": 4,
    "rollout.max_tokens": 8,
    "rollout.num_slots": 8,
    "pack.row_length": 24,
    "pack.rows": 8,
    "optimizer.learning_rate": 1e-2,
    # Enough to put something into a box, which then is right now and then.
    "warmup.steps": 60,
    "warmup.sequences_per_step": 16,
    "warmup.direct_share": 1.0,
    "warmup.learning_rate": 1e-2,
    "eval.prompts": 8,
    "checkpoint.every": 2,
    "reward.format_reward": 0.5,
  }
  for name, value in (settings | overrides).items():
    section, _, field = name.rpartition(".")
    setattr(getattr(c, section) if section else c, field, value)
  return c


def _metrics(workdir):
  """Every line, without what a clock measured."""
  lines = (workdir / "metrics.jsonl").read_text().splitlines()
  return [
    {k: v for k, v in json.loads(line).items() if "seconds" not in k}
    for line in lines
  ]


def _final_state(workdir, c):
  with checkpoint.Checkpoints(workdir, 2) as saved:
    like = rooms.state_like(house.furnish(c))
    return jax.device_get(saved.restore(c.steps, like))


def _assert_equal(a, b):
  jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
  workdir = tmp_path_factory.mktemp("whole")
  train.run(_config(), workdir)
  return workdir


def test_a_run_leaves_what_it_promises(uninterrupted):
  for name in ("config.json", "metrics.jsonl", "samples.jsonl", "report.md"):
    assert (uninterrupted / name).stat().st_size > 0
  assert (uninterrupted / "report.png").read_bytes().startswith(b"\x89PNG")
  steps = [m for m in _metrics(uninterrupted) if "reward/mean" in m]
  assert [m["step"] for m in steps] == [1, 2, 3, 4]
  assert all(m["update/compiles"] == 0 for m in steps[1:])
  assert all(m["update/grad_norm"] > 0 for m in steps)
  assert any(m["prompts/kept"] < m["prompts/drawn"] for m in steps)
  evals = [m["step"] for m in _metrics(uninterrupted) if "eval/accuracy" in m]
  assert evals == [0, 4]


def _without_compiles(workdir):
  return [
    {k: v for k, v in line.items() if k != "update/compiles"}
    for line in _metrics(workdir)
  ]


def _assert_same_run(workdir, other):
  _assert_equal(
    _final_state(workdir, _config()), _final_state(other, _config())
  )
  assert _without_compiles(workdir) == _without_compiles(other)


def _at_grading(monkeypatch, number, act):
  """Does `act` when completions are graded for the `number`-th time."""
  grade, calls = train.grade, []

  def graded(*args):
    calls.append(1)
    if len(calls) == number:
      act()
    return grade(*args)

  monkeypatch.setattr(train, "grade", graded)


def test_a_run_that_died_and_was_started_again_ends_bit_equal(
  uninterrupted, tmp_path, monkeypatch
):
  """It dies in step 4, with a checkpoint of step 2: step 3 is done again."""

  def die():
    raise SystemExit("died")

  _at_grading(monkeypatch, 4, die)
  with pytest.raises(SystemExit):
    train.run(_config(), tmp_path)
  monkeypatch.undo()
  train.run(_config(), tmp_path)
  _assert_same_run(tmp_path, uninterrupted)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_run_that_was_asked_to_stop_saves_and_goes_on(
  uninterrupted, tmp_path, monkeypatch, number
):
  """Asked in step 1, of which there would be no checkpoint otherwise."""
  _at_grading(monkeypatch, 1, lambda: signal.raise_signal(number))
  with pytest.raises(KeyboardInterrupt):
    train.run(_config(), tmp_path)
  monkeypatch.undo()
  with checkpoint.Checkpoints(tmp_path, 2) as saved:
    assert saved.latest_step() == 1
  if number == signal.SIGTERM:
    train.run(_config(), tmp_path)
    _assert_same_run(tmp_path, uninterrupted)


def test_more_steps_go_on_where_fewer_ended(uninterrupted, tmp_path):
  train.run(_config(steps=2), tmp_path)
  train.run(_config(), tmp_path)
  _assert_equal(
    _final_state(tmp_path, _config()), _final_state(uninterrupted, _config())
  )


def test_another_config_is_refused_by_name(uninterrupted):
  changed = _config(**{"optimizer.learning_rate": 0.5, "pack.row_length": 32})
  with pytest.raises(ValueError, match=r"learning_rate.*row_length"):
    train.run(changed, uninterrupted)


def _three_steps(data_axis, model_axis):
  """Tokens of three steps and the state after them, on a mesh."""
  c = _config(
    **{
      "mesh.data": data_axis,
      "mesh.model": model_axis,
      "objective.inner_updates": 2,
    }
  )
  c.objective.args["beta"] = 0.1
  h = house.furnish(c)
  with jax.set_mesh(h.mesh):
    compiled = rooms.build(h)
    like = rooms.state_like(h)
    state = jax.jit(
      lambda p: rooms.fresh_state(h, p),
      out_shardings=jax.tree.map(lambda x: x.sharding, like),
    )(h.initial_params())
    reference = jax.tree.map(lambda x: x.copy(), state.params)
    tokens = []
    for step in range(3):
      at = lambda room, s=step: keys.draw_at(h.root_key, s, room)
      prompts = data.draw(h.train, h.root_key, step, 8)
      kept = compiled.choose(at(Room.PROMPTS), state.history, prompts.ids)
      rollout = compiled.roll_out(state.params, prompts, at(Room.ROLLOUT), kept)
      # Something to learn that depends on nothing but the tokens.
      rewards = np.asarray(rollout.tokens[..., 0] % 3 == 0, np.float32)
      batch, num_micro, _ = compiled.select(
        at(Room.COMPLETIONS), prompts, rollout, rewards
      )
      batch = compiled.score(state.params, batch, num_micro)
      state, info = compiled.update(
        state, reference, batch, num_micro, np.float32(32)
      )
      state = compiled.remember(state, rollout, rewards)
      tokens.append(jax.device_get((rollout.tokens, rollout.lengths)))
    assert info["update/kl"] > 0
    return tokens, jax.device_get(state)


@pytest.fixture(scope="module")
def on_one_device():
  return _three_steps(1, 1)


@pytest.mark.parametrize("mesh", [(8, 1), (4, 2)])
def test_a_mesh_changes_no_token_and_no_more_than_rounding(mesh, on_one_device):
  tokens, state = _three_steps(*mesh)
  _assert_equal(tokens, on_one_device[0])
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4),
    state.params,
    on_one_device[1].params,
  )
  np.testing.assert_allclose(state.history, on_one_device[1].history, atol=1e-5)
  start = house.furnish(_config()).initial_params()
  moved = np.abs(np.asarray(start["embed"]) - state.params["embed"]).max()
  assert moved > 5e-3  # so that agreement says something
