"""Pruning with unbiased weights inside TRL's GRPOTrainer.

  pip install torch trl accelerate datasets  # in addition to this package
  python -m experiments.06_inside_trl.run

Writes results.jsonl: the bias of the gradient over many draws from one batch,
and the CPU seconds of a few steps with and without pruning.
"""

import functools
import json
import os
import pathlib
import tempfile
import time

import datasets
import jax
import jax.numpy as jnp
import numpy as np
import tokenizers
import torch
import transformers
import trl

from dppo_jax import algo, methods, records

HERE = pathlib.Path(__file__).parent
PROMPTS, GROUP, NEW, DRAWS, STEPS = 8, 8, 64, 100, 5
LETTERS = [chr(ord("a") + i) for i in range(26)]


@functools.cache
def _rule(budget: float):
  return jax.jit(methods.neyman_completions(budget))


class PrunedGRPOTrainer(trl.GRPOTrainer):
  """Trains on a share of each generation batch, `budget`, without bias."""

  budget = 1.0
  is_weighted = True

  def _generate_and_score_completions(self, inputs):
    batch = super()._generate_and_score_completions(inputs)
    if self.budget == 1 or not self.model.training:
      return batch
    key = jax.random.fold_in(jax.random.key(self.args.seed), self._step)
    return self.pruned(batch, key)

  def pruned(self, batch, key):
    """The rows kept, their advantages times weight x share of rows kept.

    TRL's mean over the rows it is given then divides by all that there were.
    As many rows as the budget says are always kept, so that micro-batches stay
    alike: what neyman did not need is filled up with rows of weight 0.
    """
    shape = (-1, self.num_generations)
    lengths = jnp.asarray(batch["completion_mask"].sum(1).numpy(), jnp.int32)
    lengths = lengths.reshape(shape)
    advantages = jnp.asarray(batch["advantages"].numpy()).reshape(shape)
    groups = records.Groups(
      rewards=advantages,  # read by no rule but where they are not finite
      advantages=advantages,
      lengths=lengths,
      scale=1.0 / lengths,  # loss_type="grpo" divides by the length
    )
    chosen = _rule(self.budget)(key, groups)
    weights = algo.horvitz_thompson(chosen).reshape(-1)
    num = round(self.budget * weights.size)
    rows = np.argsort(-np.asarray(weights), kind="stable")[:num].copy()
    if self.is_weighted:
      factor = np.asarray(weights)[rows] * num / weights.size
    else:
      factor = (np.asarray(weights)[rows] > 0).astype(np.float32)
    is_row = lambda x: torch.is_tensor(x) and x.shape[:1] == weights.shape
    kept = {k: x[rows] if is_row(x) else x for k, x in batch.items()}
    kept["advantages"] = kept["advantages"] * torch.from_numpy(factor)
    return kept


def reward(completion_ids, **unused) -> list[float]:
  """1 where most of the first eight tokens have odd ids."""
  odd = lambda ids: np.mean([x % 2 for x in ids[:8]])
  return [float(odd(ids) > 0.5) for ids in completion_ids]


def trainer(folder: str, budget: float = 1.0, **config) -> PrunedGRPOTrainer:
  """A trainer on a Qwen3 of random weights."""
  torch.manual_seed(0)
  vocab = {x: i for i, x in enumerate(["<pad>", "<eos>", *LETTERS])}
  letters = tokenizers.Tokenizer(
    tokenizers.models.WordLevel(vocab, unk_token="<pad>")
  )
  letters.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
  model = transformers.Qwen3ForCausalLM(
    transformers.Qwen3Config(
      vocab_size=len(vocab),
      hidden_size=128,
      intermediate_size=384,
      num_hidden_layers=4,
      num_attention_heads=4,
      num_key_value_heads=2,
      head_dim=32,
      eos_token_id=1,
      pad_token_id=0,
      bos_token_id=None,
    )
  )
  rng = np.random.default_rng(0)
  texts = ["".join(rng.choice(LETTERS, 12)) for _ in range(PROMPTS * STEPS)]
  pruned = PrunedGRPOTrainer(
    model=model,
    processing_class=transformers.PreTrainedTokenizerFast(
      tokenizer_object=letters,
      pad_token="<pad>",
      eos_token="<eos>",
      padding_side="left",
    ),
    reward_funcs=reward,
    train_dataset=datasets.Dataset.from_dict({"prompt": texts}),
    args=trl.GRPOConfig(
      output_dir=folder,
      use_cpu=True,
      bf16=False,
      gradient_checkpointing=False,
      per_device_train_batch_size=PROMPTS * GROUP,
      num_generations=GROUP,
      max_completion_length=NEW,
      loss_type="grpo",
      beta=0.0,
      max_steps=STEPS,
      learning_rate=1e-4,
      logging_strategy="no",
      save_strategy="no",
      report_to="none",
      disable_tqdm=True,
      dataloader_pin_memory=False,
      **config,
    ),
  )
  pruned.budget = budget
  return pruned


def gradient(trainer: PrunedGRPOTrainer, batch) -> np.ndarray:
  trainer.model.zero_grad()
  trainer.compute_loss(trainer.model, batch).backward()
  grads = [p.grad for p in trainer.model.parameters() if p.grad is not None]
  return torch.cat([x.flatten() for x in grads]).numpy().astype(np.float64)


def bias(folder: str, budget: float, is_weighted: bool) -> dict:
  """Compares the mean over many draws with the gradient of the batch."""
  pruned = trainer(folder)
  pruned.model.train()
  pruned.current_gradient_accumulation_steps = 1
  rows = [pruned.train_dataset[i] for i in range(PROMPTS) for _ in range(GROUP)]
  batch = pruned._generate_and_score_completions(rows)
  full = gradient(pruned, batch)
  pruned.budget, pruned.is_weighted = budget, is_weighted
  keys = jax.random.split(jax.random.key(1), DRAWS)
  mean, square = 0.0, 0.0
  for key in keys:
    one = gradient(pruned, pruned.pruned(batch, key))
    mean, square = (
      mean + one / DRAWS,
      square + ((one - full) ** 2).sum() / DRAWS,
    )
  norm, off = np.linalg.norm(full), np.linalg.norm(mean - full)
  return {
    "what": "bias",
    "budget": budget,
    "is_weighted": is_weighted,
    "draws": DRAWS,
    "needed": int((batch["advantages"] != 0).sum()),
    "of": PROMPTS * GROUP,
    "distance_of_mean": off / norm,
    # What the mean of so many draws without a bias would be off by.
    "expected_distance": ((square - off**2) / DRAWS) ** 0.5 / norm,
    "length_along_full": float(mean @ full) / norm**2,
    "distance_of_one": square**0.5 / norm,
  }


def seconds(folder: str, budget: float) -> dict:
  """CPU seconds of the steps after the first, with what generation takes."""
  pruned = trainer(folder, budget, seed=3)
  spent = {"generate": [], "step": []}

  def timed(name, function):
    def call(*args, **kwargs):
      start = time.process_time()
      result = function(*args, **kwargs)
      spent[name].append(time.process_time() - start)
      return result

    return call

  pruned._generate = timed("generate", pruned._generate)
  pruned.training_step = timed("step", pruned.training_step)
  pruned.train()
  step, generate = (
    np.median(spent["step"][1:]),
    np.median(spent["generate"][1:]),
  )
  return {
    "what": "seconds",
    "budget": budget,
    "steps": STEPS - 1,
    "step": step,
    "generate": generate,
    "rest": step - generate,
  }


def main() -> None:
  with tempfile.TemporaryDirectory() as folder:
    results = [
      bias(folder, budget, is_weighted)
      for budget in (0.5, 0.25)
      for is_weighted in (True, False)
    ]
    results += [seconds(folder, budget) for budget in (1.0, 0.5, 0.25)]
  versions = {
    "trl": trl.__version__,
    "torch": torch.__version__,
    "transformers": transformers.__version__,
    "jax": jax.__version__,
    "threads": torch.get_num_threads(),
  }
  with open(HERE / "results.jsonl", "w", encoding="utf-8") as file:
    for result in results:
      print(result)
      file.write(json.dumps(result | versions, default=float) + "\n")


if __name__ == "__main__":
  os.environ.setdefault("JAX_PLATFORMS", "cpu")
  main()
