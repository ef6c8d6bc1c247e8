"""The loop: resume equals uninterrupted, sharded equals unsharded."""

import errno
import json
import pathlib
import re
import shutil
import signal
from unittest import mock

import chex
import jax
import numpy as np
import pytest

from dppo_jax import config, methods, train
from dppo_jax.errors import StopTraining, UserError
from dppo_jax.files import jsonl
from dppo_jax.metrics import writer
from dppo_jax.run import checkpoint, checkpoint_steps
from dppo_jax.run.setup import setup_run
from dppo_jax.step import abstract_values, grade
from dppo_jax.step.optimizer import last_learning_rate, make_schedule

pytestmark = pytest.mark.slow


def _config(**overrides) -> config.Config:
  """A barely trained model, on problems of one operation."""
  c = config.Config()
  config.use_method(c, overrides.pop("method", "dppo"))
  c.method.args |= overrides.pop("args", {})
  settings = {
    "steps": 4,
    "model.shape.layers": 1,
    "model.shape.embed": 16,
    "model.shape.mlp": 32,
    "model.shape.head_dim": 8,
    "data.train": "arithmetic:20:1",  # an epoch of two steps
    "data.prompts_per_step": 8,
    "data.eval_limit": 8,
    "rollout.group_size": 4,
    "rollout.max_tokens": 8,
    "rollout.num_slots": 4,  # one stage of decoding to compile
    "pack.row_length": 24,
    "pack.rows_per_micro": 8,
    "optimizer.learning_rate": 1e-2,
    # Enough to put something into a box, which then is right now and then.
    "sft.steps": 150,
    "checkpoint.every": 2,
    "reward.functions": "exact,boxed:0.5",
    "log.writers": "tensorboard,completions",
  }
  for name, value in (settings | overrides).items():
    config.assign(c, name, value)
  return c


def _metrics(workdir):
  """Returns every line, without measured times."""
  lines = (workdir / "metrics.jsonl").read_text().splitlines()
  return [
    {k: v for k, v in json.loads(line).items() if "seconds" not in k}
    for line in lines
  ]


def _completions(workdir):
  files = sorted((workdir / "completions").iterdir())
  return [line for path in files for line in jsonl.read(path)]


def _final_state(workdir, c):
  with checkpoint.Checkpoints(workdir, 2) as checkpoints:
    abstract = abstract_values.abstract_train_state(setup_run(c).spec)
    return jax.device_get(checkpoints.restore(c.steps, abstract))


@pytest.fixture(scope="module", autouse=True)
def compile_once():
  """Makes runs of equal configs share compiled programs.

  Programs compiled again, in another process, are the matter of test_kill.
  """
  compiled, compile_all, flat = {}, train._compile, {}

  def set_up(c, **options):
    flat.update(config.flatten(c))
    return setup_run(c, **options)

  def compile_new(run, task):
    options = {k: x for k, x in flat.items() if not k.startswith("sft.")}
    key = json.dumps(options, sort_keys=True, default=str)
    if key not in compiled:
      compiled[key] = compile_all(run, task)
    return compiled[key]

  with mock.patch.multiple(train, _compile=compile_new, setup_run=set_up):
    yield


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, compile_once):
  workdir = tmp_path_factory.mktemp("whole")
  train.run(_config(), workdir)
  return workdir


def test_a_run_writes_all_documented_files(uninterrupted):
  for name in ("config.json", "metrics.jsonl", "samples.jsonl", "report.md"):
    assert (uninterrupted / name).stat().st_size > 0
  assert (uninterrupted / "report.png").read_bytes().startswith(b"\x89PNG")
  log = (uninterrupted / "log.txt").read_text(encoding="utf-8")
  interval = r"0\.\d+ \(0\.\d+ to [01]\.\d+\)"
  both = rf"\(2 problems x 1\): sampled {interval}, greedy {interval}, length"
  assert len(re.findall(f"held-out accuracy {both}", log)) == 2
  *_, results, following = re.split("result: |next:", log)
  assert results.startswith("sampled accuracy (")
  assert "--mode=evaluate --workdir=" in following
  steps = [m for m in _metrics(uninterrupted) if "reward/mean" in m]
  assert [m["step"] for m in steps] == [1, 2, 3, 4]
  assert all(m["update/compiles"] == 0 for m in steps[1:])
  assert all(m["update/grad_norm"] > 0 for m in steps)
  assert any(m["prompts/kept"] < m["prompts/drawn"] for m in steps)
  assert not any("warnings/" in name for m in steps for name in m)
  for m in steps:
    lengths = [m[f"tokens/completion_{x}"] for x in ("min", "mean", "max")]
    assert 1 <= lengths[0] <= lengths[1] <= lengths[2] <= 8
    assert m["update/clipped_norm"] == (m["update/grad_norm"] >= 1)
    assert m["update/learning_rate"] == 1e-2
  assert any(m["reward/std"] > 0 for m in steps)
  for m in steps:
    lines = [x for x in _completions(uninterrupted) if x["step"] == m["step"]]
    assert len(lines) == m["completions/drawn"]
    assert sum(x["kept"] for x in lines) == m["completions/kept"]
    mean = np.mean([x["reward"] for x in lines])
    assert mean == pytest.approx(m["reward/mean"])
    for x in lines:
      weighted = x["rewards"]["exact"] + 0.5 * x["rewards"]["boxed"]
      assert x["reward"] == weighted and x["logprob"] < 0
  evals = [m["step"] for m in _metrics(uninterrupted) if "eval/accuracy" in m]
  assert evals == [0, 4]


def test_the_logged_learning_rate_is_that_of_the_last_update():
  """Skipped updates do not count; each step has two updates."""
  schedule = make_schedule(1e-2, 10, warmup_steps=3)
  rates = [last_learning_rate(schedule, num, 1.0) for num in (2, 4, 6)]
  np.testing.assert_allclose(rates, [1e-2 / 3, 1e-2, 1e-2], rtol=1e-6)


def _assert_explained(workdir):
  """Every metric is in the glossary; NAME stands for a name of the user's."""
  page = pathlib.Path(writer.__file__).parent / "README.md"
  known = re.findall(r"^\| `(\w+/[\w/]+)` \|", page.read_text(), re.MULTILINE)
  assert len(known) == len(set(known))
  names = {name for x in jsonl.read(workdir / "metrics.jsonl") for name in x}
  patterns = [re.sub("NAME|K$", r"\\w+", name) for name in known]
  for name in names - {"step"}:
    assert any(re.fullmatch(x, name) for x in patterns), name


def test_every_metric_is_explained(uninterrupted):
  _assert_explained(uninterrupted)


def test_training_does_not_depend_on_held_out_problems(uninterrupted, tmp_path):
  c = _config(**{"data.eval": ""})
  train.run(c, tmp_path)
  chex.assert_trees_all_equal(
    _final_state(tmp_path, c), _final_state(uninterrupted, _config())
  )
  assert not any("eval/accuracy" in m for m in _metrics(tmp_path))
  assert "held-out" not in (tmp_path / "report.md").read_text()
  assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")


def _without_compiles(workdir):
  return [
    {k: v for k, v in line.items() if k != "update/compiles"}
    for line in _metrics(workdir)
  ]


def _assert_same_run(workdir, other):
  chex.assert_trees_all_equal(
    _final_state(workdir, _config()), _final_state(other, _config())
  )
  assert _without_compiles(workdir) == _without_compiles(other)
  assert _completions(workdir) == _completions(other)


def _at_grading(monkeypatch, number, act):
  """Does `act` when completions are graded for the `number`-th time."""
  graded_once, calls = grade.grade, []

  def graded(*args, **options):
    calls.append(1)
    if len(calls) == number:
      act()
    return graded_once(*args, **options)

  monkeypatch.setattr(grade, "grade", graded)


def test_resumed_run_ends_bit_identical(uninterrupted, tmp_path, monkeypatch):
  """It dies in step 4, with a checkpoint of step 2: step 3 is done again."""

  def die():
    raise SystemExit("died")

  _at_grading(monkeypatch, 4, die)
  with pytest.raises(SystemExit):
    train.run(_config(), tmp_path)
  monkeypatch.undo()
  train.run(_config(), tmp_path)
  _assert_same_run(tmp_path, uninterrupted)


def test_run_stopped_before_its_first_checkpoint_reports_it(
  tmp_path, monkeypatch, capsys
):
  stop = lambda *unused: signal.raise_signal(signal.SIGTERM)
  monkeypatch.setattr(train, "_train", stop)
  with pytest.raises(KeyboardInterrupt):
    train.run(_config(), tmp_path)
  assert "stopped before the first step; nothing" in capsys.readouterr()[0]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stopped_run_saves_and_resumes(
  uninterrupted, tmp_path, monkeypatch, number
):
  """Stops in step 1, which would otherwise have no checkpoint."""
  _at_grading(monkeypatch, 1, lambda: signal.raise_signal(number))
  with pytest.raises(KeyboardInterrupt):
    train.run(_config(), tmp_path)
  monkeypatch.undo()
  with checkpoint.Checkpoints(tmp_path, 2) as checkpoints:
    assert checkpoints.latest_step() == 1
  if number == signal.SIGTERM:
    train.run(_config(), tmp_path)
    _assert_same_run(tmp_path, uninterrupted)


def test_a_signal_while_the_last_checkpoint_is_written_loses_nothing(
  uninterrupted, tmp_path, monkeypatch
):
  leave = checkpoint.Checkpoints.__exit__

  def stop(*args):
    signal.raise_signal(signal.SIGTERM)
    leave(*args)

  monkeypatch.setattr(checkpoint.Checkpoints, "__exit__", stop)
  try:
    train.run(_config(), tmp_path)
  except KeyboardInterrupt:
    pytest.fail("the signal has ended the run")
  monkeypatch.undo()
  _assert_same_run(tmp_path, uninterrupted)


def test_finished_run_is_reported_at_once(uninterrupted, monkeypatch, capsys):
  files = [uninterrupted / x for x in ("metrics.jsonl", "config.json")]
  before = [file.read_bytes() for file in files]
  monkeypatch.setattr(train, "setup_run", None)  # nothing is set up
  train.run(_config(), uninterrupted)
  output = capsys.readouterr().out
  assert output.startswith("already done: 4 of 4 steps")
  assert (
    str(uninterrupted / "report.md") in output and "config.steps=8" in output
  )
  train.run(_config(steps=2), uninterrupted)
  assert "already done: 4 of 2 steps" in capsys.readouterr()[0]
  train.run(_config(**{"checkpoint.keep": 1}), uninterrupted)
  assert checkpoint_steps.complete_steps(uninterrupted) == [0, 2, 4]
  assert [file.read_bytes() for file in files] == before
  with pytest.raises(ValueError, match="group_size was 4 and is now 8"):
    train.run(_config(**{"rollout.group_size": 8}), uninterrupted)


@pytest.mark.parametrize(
  ("method", "ending"),
  [("dppo", "=8 --allow_change=optimizer trains longer"), ("d3s", None)],
)
def test_finished_run_names_what_trains_it_longer(
  uninterrupted, capsys, tmp_path, method, ending
):
  run = tmp_path / "run"
  shutil.copytree(uninterrupted, run)
  c = _config(method=method, **{"optimizer.schedule": "linear"})
  (run / "config.json").write_text(json.dumps(config.flatten(c)))
  train.run(c, run)
  output = capsys.readouterr().out
  assert ending in output if ending else "trains longer" not in output


def test_finished_run_that_cannot_be_written_is_reported_too(
  uninterrupted, monkeypatch, capsys, tmp_path
):
  run = tmp_path / "run"
  shutil.copytree(uninterrupted, run)
  (run / "report.md").unlink()

  def replace(path, to):
    raise OSError(errno.EROFS, "Read-only file system", str(to))

  monkeypatch.setattr("os.replace", replace)
  monkeypatch.setattr("pathlib.Path.replace", replace)
  train.run(_config(), run)
  output = capsys.readouterr().out
  assert re.search("warning: .*report.*: Read-only file system", output)
  assert "already done: 4 of 4 steps" in output


def test_a_destroyed_policy_is_reported(tmp_path, capsys):
  """Rewards that are all 0 have a gradient that is 0 and finite."""
  c = _config(
    **{
      "steps": 12,
      "optimizer.learning_rate": 1e6,
      "reward.functions": "exact",
      "checkpoint.every": 0,
    }
  )
  train.run(c, tmp_path)
  output = " ".join(capsys.readouterr().out.split())
  assert "no token was trained on in the last 10 steps" in output
  report = (tmp_path / "report.md").read_text()
  assert re.search(r"steps with the warning nothing_trained \| [1-9]", report)


def test_more_steps_resume_a_finished_run(uninterrupted, tmp_path):
  train.run(_config(steps=2), tmp_path)
  train.run(_config(), tmp_path)
  chex.assert_trees_all_equal(
    _final_state(tmp_path, _config()), _final_state(uninterrupted, _config())
  )


def test_another_config_is_rejected_by_name(uninterrupted):
  changed = _config(**{"optimizer.learning_rate": 0.5, "pack.row_length": 32})
  with pytest.raises(ValueError, match=r"learning_rate.*row_length"):
    train.run(changed, uninterrupted)


# d1s and d2s consist of the rules of pods and d3s.
@pytest.mark.parametrize(
  "method", sorted(methods.METHODS.keys() - {"d1s", "d2s"})
)
def test_every_method_trains_without_recompiling(
  uninterrupted, tmp_path, method
):
  first_weights = {"sft.from_run": str(uninterrupted)}
  c = _config(method=method, **first_weights | {"data.eval": ""})
  if method == "neyman":
    c.method.args["token_budget"] = 0.5
  train.run(c, tmp_path)
  _assert_explained(tmp_path)
  steps = [m for m in _metrics(tmp_path) if "reward/mean" in m]
  assert len(steps) == 4 and all(m["update/compiles"] == 0 for m in steps[1:])
  assert all(np.isfinite(m["update/grad_norm"]) for m in steps)
  assert sum(m["tokens/trained"] for m in steps) > 0
  sizes = [m["completions/drawn"] / max(m["prompts/kept"], 1) for m in steps]
  assert set(sizes) <= {0, 4}
  whole = [m for m in _metrics(uninterrupted) if "reward/mean" in m]
  # The same weights and prompts, of which every method samples alike.
  if method in ("grpo", "dppo", "cppo", "pods", "d3s"):
    assert steps[0]["reward/mean"] == whole[0]["reward/mean"]


@pytest.mark.parametrize("objective", ["dapo", "gspo"])
def test_every_objective_trains(uninterrupted, tmp_path, objective):
  """The second update is off-policy, and every option is set."""
  c = _config(
    method=f"neyman,{objective}",
    args={"token_budget": 0.7},
    **{
      "sft.from_run": str(uninterrupted),
      "data.eval": "",
      "objective.inner_updates": 2,
      "objective.mini_batches": 4 if objective == "gspo" else 1,
      "objective.mask_truncated": objective != "gspo",
      "reward.overlong_tokens": 4,
    },
  )
  c.objective.args |= {"beta": 0.1, "sampler_cap": 2.0}
  train.run(c, tmp_path)
  steps = [m for m in _metrics(tmp_path) if "reward/mean" in m]
  assert all(m["update/compiles"] == 0 for m in steps[1:])
  assert all(np.isfinite(m["update/grad_norm"]) for m in steps)
  # A step may draw nothing but problems that are known by heart.
  learning = [m for m in steps if m["update/grad_norm"] > 0]
  assert learning
  assert any(m["update/policy_ratio_max"] > 1 for m in learning)
  assert any(m["update/kl"] > 0 for m in learning)
  assert any(m["tokens/weight_max"] > 1 for m in learning)


def test_dynamic_sampling_draws_until_it_is_full_and_resumes(
  uninterrupted, tmp_path, monkeypatch
):
  first_weights = {"sft.from_run": str(uninterrupted)}
  options = {"data.eval": "", "objective.mini_batches": 2}
  c = _config(method="greso", **first_weights | options)
  train.run(c, tmp_path / "whole")
  steps = [m for m in _metrics(tmp_path / "whole") if "reward/mean" in m]
  assert any(m["prompts/drawn"] > 8 for m in steps)
  for m in steps:
    nonzero = m["prompts/kept"] - m["groups/zero_std"]
    assert m["prompts/drawn"] == 32 or nonzero >= 8
    assert m["completions/trained"] <= 32

  a = _final_state(tmp_path / "whole", c)
  middle = int(a.draws) // 2
  stop = lambda: signal.raise_signal(signal.SIGTERM)
  _at_grading(monkeypatch, middle, stop)
  with pytest.raises(KeyboardInterrupt):
    train.run(c, tmp_path / "stopped")
  monkeypatch.undo()
  train.run(c, tmp_path / "stopped")
  b = _final_state(tmp_path / "stopped", c)
  assert a.draws > a.step == 4
  chex.assert_trees_all_equal(a, b)


def test_a_callback_ends_the_run_as_its_last_step(uninterrupted, tmp_path):
  """It sees the last evaluation; the same command continues."""
  seen = []

  def end_after_two(step, info, state):
    seen.append(dict(info.evaluation))
    if step == 2:
      raise StopTraining("two are enough")

  c = _config(**{"sft.from_run": str(uninterrupted), "eval.every": 1})
  train.run(c, tmp_path, [end_after_two])
  steps = [m["step"] for m in _metrics(tmp_path) if "reward/mean" in m]
  reason = "end_after_two ended the run after step 2: two are enough"
  assert steps == [1, 2]
  for name in ("report.md", "log.txt"):
    assert reason in (tmp_path / name).read_text()
  last = [m for m in _metrics(tmp_path) if "eval/accuracy" in m][-1]
  assert last["step"] == 2 and "eval/greedy_accuracy" in last
  assert [x["eval/accuracy"] for x in seen] == [
    m["eval/accuracy"] for m in _metrics(tmp_path) if "eval/accuracy" in m
  ][:2]
  train.run(c, tmp_path)
  steps = [m["step"] for m in _metrics(tmp_path) if "reward/mean" in m]
  assert steps == [1, 2, 3, 4]


def test_a_run_without_an_interval_saves_by_time_and_resumes(
  uninterrupted, tmp_path, monkeypatch
):
  """A kill repeats some steps; callbacks see the evaluations of a full run."""
  seen = {"whole": [], "part": []}

  def watch(name, last=0):
    def callback(step, info, state):
      if step == last:
        raise OSError("killed")
      seen[name].append(dict(info.evaluation))

    return [callback]

  c = _config(
    **{
      "sft.from_run": str(uninterrupted),
      "eval.every": 2,
      "checkpoint.every": 0,
    }
  )
  train.run(c, tmp_path / "whole", watch("whole"))
  assert checkpoint_steps.complete_steps(tmp_path / "whole") == [0, 4]
  monkeypatch.setattr(train, "_SAVE_SECONDS", 0)
  with pytest.raises(OSError, match="killed"):
    train.run(c, tmp_path / "part", watch("part", last=4))
  # What the last save has dropped may still be there.
  assert {0, 2, 3} <= {*checkpoint_steps.complete_steps(tmp_path / "part")}
  train.run(c, tmp_path / "part", watch("part"))
  assert (
    seen["part"] == seen["whole"] and seen["part"][-1]["eval/accuracy"] >= 0
  )
  chex.assert_trees_all_equal(
    *(_final_state(tmp_path / x, c) for x in ("whole", "part"))
  )


def test_another_learning_rate_on_resume_equals_a_schedule_with_a_step(
  uninterrupted, tmp_path
):
  (tmp_path / "my.py").write_text("""
import jax.numpy as jnp
import optax

def stepped(learning_rate):
  rate = lambda count: jnp.where(count < 2, 1e-2, 1e-3)
  return optax.adamw(rate, weight_decay=0.0), rate
""")
  options = {"sft.from_run": str(uninterrupted), "data.eval": ""}
  stepped = {"optimizer.function": f"{tmp_path / 'my.py'}:stepped"}
  whole = _config(**options | stepped)
  train.run(whole, tmp_path / "whole")
  part = tmp_path / "part"
  train.run(_config(**options, steps=2), part)
  saved = part / "checkpoints"
  shutil.copytree(saved / "2", saved / "3")  # damaged: it is of another step
  c = _config(**options | {"optimizer.learning_rate": 1e-3})
  with pytest.raises(UserError, match="--allow_change=optimizer"):
    train.run(c, part)
  train.run(c, part, allow_change="optimizer")
  chex.assert_trees_all_equal(
    _final_state(tmp_path / "whole", whole), _final_state(part, c)
  )
  rates = [m.get("update/learning_rate") for m in _metrics(part)]
  np.testing.assert_allclose(
    [x for x in rates if x], [1e-2, 1e-2, 1e-3, 1e-3], rtol=1e-6
  )
  change = "optimizer.learning_rate after step 2 | 0.01 to 0.001"
  assert change in (part / "report.md").read_text()
  line = "changed config.optimizer.learning_rate from 0.01 to 0.001"
  assert f"{line}, after step 2" in (part / "log.txt").read_text()
  train.run(c, part)  # done, and the flag is needed no more


@pytest.mark.parametrize("named, step", [("", 0), ("@2", 2)])
def test_a_run_starts_from_weights_of_another(
  uninterrupted, tmp_path, named, step
):
  """Restored before the first evaluation, without a warm-up."""
  c = _config(steps=0, **{"sft.from_run": f"{uninterrupted}{named}"})
  train.run(c, tmp_path)
  with checkpoint.Checkpoints(tmp_path, 2) as mine:
    abstract = abstract_values.abstract_train_state(setup_run(c).spec)
    params = mine.restore_params(0, abstract.params)
  with checkpoint.Checkpoints(uninterrupted, 2) as other:
    chex.assert_trees_all_equal(
      params, other.restore_params(step, abstract.params)
    )


def test_weights_that_another_run_did_not_keep_are_rejected(uninterrupted):
  c = _config(**{"sft.from_run": f"{uninterrupted}@3"})
  with pytest.raises(ValueError, match=r"of step 3 in .*; available: 0, 2, 4"):
    setup_run(c)
  c = _config(**{"sft.from_run": str(uninterrupted), "model.shape.mlp": 8})
  with pytest.raises(UserError, match=r"step 0 in .* holds another model"):
    setup_run(c)
