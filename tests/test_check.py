"""--mode=check: a table that is right here, and names what is wrong."""

import functools
import re

import jax
import pytest

from dppo_jax import check, main
from dppo_jax.models import attention
from dppo_jax.run import checkpoint, setup
from tests.helpers import commands

SETTINGS = {
  "model__shape__layers": 1,
  "model__shape__embed": 16,
  "model__shape__mlp": 32,
  "model__shape__head_dim": 8,
  "data__train": "arithmetic:64:1",
  "data__eval": "",
  "data__prompts_per_step": 8,
  "rollout__group_size": 4,
  "rollout__num_slots": 8,
  "rollout__max_tokens": 8,
  "rollout__top_p": 0.9,
  "pack__row_length": 64,
}
NAMES = (
  "devices config attention weights step decode micro sampler checkpoint grader"
)


@pytest.fixture(autouse=True)
def patience(monkeypatch):
  """Other processes slow this machine."""
  monkeypatch.setattr(check, "_SLOWER", 1e6)


def _check(capsys, tmp_path, *flags, **options):
  """Returns the exit status, and each row's verdict and text by its name."""
  words = [f"--config.{k.replace('__', '.')}={v}" for k, v in options.items()]
  config = commands.ROOT / "configs/arithmetic.py"
  status = 0
  try:
    main.main([
      *("main", "--mode=check", f"--config={config}"),
      *(f"--workdir={tmp_path / 'run'}", *words, *flags),
    ])  # fmt: skip
  except SystemExit as error:
    status = error.code
  printed = capsys.readouterr().out
  long = [x for x in printed.splitlines() if len(x) > 79]
  assert not [x for x in long if " " in x.strip()]  # but for paths
  text = re.sub(r"\n {20}", " ", printed)
  lines = re.findall(r"^(\w+)(?:[ -]\w+)? +(right|WRONG) +(.*)", text, re.M)
  return status, {name: (word, text) for name, word, text in lines}


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{}, {"mesh__data": 2, "mesh__model": 2}])
def test_everything_is_right_here(mesh, capsys, tmp_path):
  status, rows = _check(capsys, tmp_path, **SETTINGS, **mesh)
  assert [*rows] == NAMES.split()
  assert {word for word, _ in rows.values()} == {"right"}, rows
  assert status == 0
  assert "8 slots" in rows["decode"][1] and "predicted" in rows["micro"][1]
  assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_wrong_attention_is_named_and_ends_with_status_1(
  capsys, tmp_path, monkeypatch
):
  """The sampler, which decodes without it, differs from the trainer."""
  right = attention.BACKENDS["xla_by_row"]
  wrong = lambda q, k, *more: right(q, k * 1.5, *more)
  monkeypatch.setitem(attention.BACKENDS, "xla_by_row", wrong)
  status, rows = _check(capsys, tmp_path, **SETTINGS)
  assert status == 1
  wrong = [name for name, (word, _) in rows.items() if word == "WRONG"]
  assert wrong == ["attention", "sampler"]
  assert "set config.model.attention=xla" in rows["attention"][1]
  assert "the mean is above 0.0001" in rows["sampler"][1]


def test_a_config_that_cannot_run_is_a_row(capsys, tmp_path):
  options = {**SETTINGS, "mesh__model": 3}
  status, rows = _check(capsys, tmp_path, **options)
  assert status == 1 and [*rows] == ["devices", "config"]
  assert rows["config"][0] == "WRONG"
  assert "config.mesh.model is 3" in rows["config"][1]


def test_restored_weights_are_compared(monkeypatch, tmp_path):
  run = setup.setup_run(commands.config("arithmetic", **SETTINGS))
  restore = checkpoint.Checkpoints.restore_params
  wrong = lambda *args: jax.tree.map(lambda x: x + 1, restore(*args))
  state = check.abstract_values.new_train_state(run.spec, run.initial_params())
  (tmp_path / "check").mkdir()  # a run of the user's
  text, _ = check._checkpoint(run, state, tmp_path)
  assert text.startswith("saved and restored")
  monkeypatch.setattr(checkpoint.Checkpoints, "restore_params", wrong)
  with pytest.raises(
    check.UserError, match="differ from those that were saved"
  ):
    check._checkpoint(run, state, tmp_path)
  assert [x.name for x in tmp_path.iterdir()] == ["check"]


def test_a_slow_stage_is_named(monkeypatch):
  monkeypatch.setattr(check, "_SLOWER", 5)
  judge = functools.partial(
    check._judge_seconds, "decode step", parts=2, facts="2 rows"
  )
  assert judge(1.0, 0.2) == ("500 ms, predicted 100 ms, 2 rows", None)
  assert "does not know this device" in judge(1.0, 0.0)[0]
  with pytest.raises(check.UserError, match="look for other processes"):
    judge(1.2, 0.2)


def test_an_accelerator_that_jax_does_not_use_is_named(monkeypatch, tmp_path):
  monkeypatch.delenv("JAX_PLATFORMS", raising=False)
  monkeypatch.setattr(check, "_DRIVERS", {f"{tmp_path}/none": "tpu"})
  assert "python 3" in check._devices()[0]
  monkeypatch.setattr(check, "_DRIVERS", {str(tmp_path): "cuda"})
  with pytest.raises(check.UserError, match=r"pip install -e '\.\[cuda\]'"):
    check._devices()


@pytest.mark.parametrize(
  ("name", "kind"),
  [
    ("NVIDIA H100 80GB HBM3", "h100"),
    ("NVIDIA B200", "b200"),
    ("NVIDIA L4", ""),
    ("TPU v5 lite", "v5e"),
    ("TPU v5e", "v5e"),
    ("TPU v5p", "v5p"),
    ("TPU v5", "v5p"),
    ("TPU v6 lite", "v6e"),
    ("TPU v4", "v4"),
    ("cpu", "cpu"),
  ],
)
def test_devices_have_the_peaks_of_their_kind(name, kind):
  assert check._kind(type("Device", (), {"device_kind": name})) == kind
