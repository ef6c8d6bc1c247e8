"""TRL's GRPOTrainer, trained on a fraction of each batch without bias.

  pip install 'torch==2.13.0' trl
  python experiments/examples/trl_trainer.py DIR

DIR is a directory with a checkpoint. TRL samples, grades and computes the
advantages of all completions; the subclass keeps some of them and weights their
advantages so that the expected gradient is that of all.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import torch
import trl

import dppo_jax as dx

# The factor that each TRL loss applies to a completion's tokens, and whether it
# divides by the number of completions that it is given. `bnpo` is missing: it
# divides by the number of tokens that it is given, which biases any choice.
LOSSES = {
  "grpo": (lambda lengths: 1.0 / lengths, True),
  "sapo": (lambda lengths: 1.0 / lengths, True),
  "dr_grpo": (jnp.ones_like, True),
  "luspo": (jnp.ones_like, True),
  "dapo": (jnp.ones_like, False),
  "cispo": (jnp.ones_like, False),
}


class PrunedGRPOTrainer(trl.GRPOTrainer):
  """Trains on the fraction `budget` of the completions of each batch."""

  budget = 0.5
  rule = staticmethod(jax.jit(dx.methods.neyman_completions(budget)))

  def _generate_and_score_completions(self, inputs):
    batch = super()._generate_and_score_completions(inputs)
    return self.pruned(batch) if self.model.training else batch

  def pruned(self, batch, seed=None):
    """Returns the completions kept, with weighted advantages."""
    scale, is_mean = LOSSES[self.loss_type]
    by_group = lambda x: jnp.float32(x.float().cpu().numpy()).reshape(
      -1, self.num_generations
    )
    lengths = by_group(batch["completion_mask"].sum(1))
    advantages = by_group(batch["advantages"])
    groups = dx.records.Groups(
      advantages, advantages, jnp.int32(lengths), scale=scale(lengths)
    )
    key = jax.random.key(self._step if seed is None else seed)
    weights = dx.algo.horvitz_thompson(self.rule(key, groups)).reshape(-1)
    # Always the same number, so that micro-batches stay alike: completions of
    # weight 0 fill up.
    num = round(self.budget * weights.size)
    rows = np.argsort(-np.asarray(weights), kind="stable")[:num].copy()
    factor = np.asarray(weights)[rows] * (num / weights.size if is_mean else 1)
    is_row = lambda x: torch.is_tensor(x) and x.shape[:1] == weights.shape
    kept = {k: x[rows] if is_row(x) else x for k, x in batch.items()}
    kept["advantages"] = kept["advantages"] * torch.from_numpy(factor).to(
      kept["advantages"].device
    )
    return kept


def brief(completions, **columns):
  """Rewards short completions."""
  return [1.0 / (1 + len(text)) for text in completions]


def main(directory: str, **options) -> PrunedGRPOTrainer:
  """Trains for two steps on eight prompts."""
  import datasets  # comes with TRL

  prompts = [f"Count to {x}." for x in range(2, 10)]
  trainer = PrunedGRPOTrainer(
    model=directory,
    reward_funcs=brief,
    train_dataset=datasets.Dataset.from_dict({"prompt": prompts}),
    args=trl.GRPOConfig(
      output_dir="runs/trl",
      max_steps=2,
      num_generations=4,
      per_device_train_batch_size=16,
      max_completion_length=16,
      logging_steps=1,
      save_strategy="no",
      use_cpu=not torch.cuda.is_available(),
      bf16=torch.cuda.is_available(),
      report_to="none",
      **options,
    ),
  )
  trainer.train()
  return trainer


if __name__ == "__main__":
  main(sys.argv[1])
