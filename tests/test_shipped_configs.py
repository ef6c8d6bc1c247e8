"""Every shipped config starts as it stands, from the hub's cache."""

import os
import subprocess
import sys

from huggingface_hub import constants
import pytest

from dppo_jax.errors import UserError
from dppo_jax.models import hf
from dppo_jax.run import setup
from tests.helpers import commands, hub_cache

CONFIGS = {
  "gemma_gsm8k": ("Gemma3ForCausalLM", 152, ["gsm8k"], 8),
  "gsm8k": ("Qwen3ForCausalLM", 152, ["gsm8k"], 8),
  "llama_math": ("LlamaForCausalLM", 160, ["MATH-500"], 8),
  "qwen3_moe_math": ("Qwen3MoeForCausalLM", 160, ["MATH-500"], 8),
  "qwen_math": ("Qwen2ForCausalLM", 160, ["MATH-500"], 8),
  "smollm2": ("LlamaForCausalLM", 372, ["single_test"], 75),
}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
  """HF_HOME with a tiny checkpoint and a few rows for each name."""
  path = tmp_path_factory.mktemp("hub")
  hub_cache.write(path)
  return path


@pytest.mark.parametrize("name", CONFIGS)
def test_model_and_data_of_a_config_are_found(home, name, monkeypatch):
  monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
  monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
  config = commands.parse([f"--config=configs/{name}.py"])
  run = setup.setup_run(config)
  family, num_train, eval_names, num_eval = CONFIGS[name]
  assert run.spec.model.family == family
  assert len(run.train_set) == num_train
  assert list(run.eval_sets) == eval_names
  assert [len(x) for x in run.eval_sets.values()] == [num_eval]
  assert all(run.train_set.answers)


@pytest.mark.slow
def test_flagship_trains_by_its_shipped_command(home, tmp_path):
  environment = {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1"}
  done = subprocess.run(
    [
      *(sys.executable, "-m", "dppo_jax.main"),
      *("--config=configs/qwen_math.py", "--config.steps=1"),
      f"--workdir={tmp_path / 'run'}",
    ],
    cwd=commands.ROOT,
    env=os.environ | environment | {"JAX_PLATFORMS": "cpu"},
    capture_output=True,
    check=False,
    text=True,
  )
  assert done.returncode == 0, done.stderr
  assert "step 1 of 1" in done.stdout
  assert (tmp_path / "run/report.md").exists()


def test_data_are_looked_for_before_weights_are_fetched(monkeypatch):
  config = commands.config("gsm8k", data__train="none.jsonl")
  monkeypatch.setattr(hf, "fetch", lambda *_: pytest.fail("weights fetched"))
  with pytest.raises(UserError, match=r"^config\.data\.train: .*none\.jsonl"):
    setup.setup_run(config)
