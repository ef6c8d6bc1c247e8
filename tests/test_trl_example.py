"""The example's subclass of TRL's trainer trains without bias."""

import importlib.util
import sys

import numpy as np
import pytest

from tests.helpers import commands, hub_cache

torch = pytest.importorskip("torch")
trl = pytest.importorskip("trl")
pytest.importorskip("datasets")

PATH = commands.ROOT / "experiments/examples/trl_trainer.py"
pytestmark = [
  pytest.mark.slow,
  pytest.mark.filterwarnings("ignore::FutureWarning"),
  pytest.mark.filterwarnings("ignore::DeprecationWarning"),
  pytest.mark.filterwarnings("ignore::UserWarning"),
]
DRAWS = 64


@pytest.fixture(scope="module")
def example():
  spec = importlib.util.spec_from_file_location("trl_trainer", PATH)
  module = sys.modules["trl_trainer"] = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


@pytest.mark.parametrize("loss", ["grpo", "dapo"])
def test_mean_pruned_gradient_is_the_full_one(
  example, loss, tmp_path, monkeypatch
):
  monkeypatch.chdir(tmp_path)
  hub_cache.write_checkpoint(tmp_path / "model")
  trainer = example.main(str(tmp_path / "model"), loss_type=loss)
  assert trainer.state.global_step == 2
  trainer.model.train()
  trainer.current_gradient_accumulation_steps = 1

  def gradient(batch):
    trainer.model.zero_grad()
    trainer.compute_loss(trainer.model, batch).backward()
    grads = [p.grad for p in trainer.model.parameters() if p.grad is not None]
    return torch.cat([x.flatten() for x in grads]).numpy().astype(np.float64)

  trainer.budget = 1.0
  rows = [trainer.train_dataset[i] for i in range(4) for _ in range(4)]
  full_batch = super(
    example.PrunedGRPOTrainer, trainer
  )._generate_and_score_completions(rows)
  full = gradient(full_batch)
  trainer.budget = 0.5
  draws = np.stack(
    [gradient(trainer.pruned(full_batch, seed)) for seed in range(DRAWS)]
  )
  assert len(trainer.pruned(full_batch, 0)["advantages"]) == 8
  error = np.linalg.norm(draws.mean(0) - full)
  expected = (((draws - full) ** 2).sum(1).mean() / DRAWS) ** 0.5
  assert 0.3 * expected < error < 2 * expected
  assert error < 0.3 * np.linalg.norm(full)
