"""Chain arithmetic on two CPU cores, from random weights.

  python -m dppo_jax.main --config=configs/arithmetic.py
  python -m dppo_jax.main --config=configs/arithmetic.py:grpo

After supervised fine-tuning half of the sampled completions show their work and
the others guess; reinforcement learning teaches the model to show it always. A
run takes two to five minutes, including a quarter of a minute of training
steps. Expect a sampled accuracy, on 256 held-out problems, of 0.45 at first,
0.6 after 100 steps and 0.8 at the end. The greedy one goes from 0.2 to 0.9: it
needs only the better way of answering to become the more frequent.
"""

from dppo_jax.config import Config, use_method


def get_config(method: str = "neyman") -> Config:
  config = Config()
  use_method(config, method)
  config.steps = 300
  config.model.remat = "none"  # the activations are small
  config.data.prompts_per_step = 32
  config.rollout.group_size = 8
  config.rollout.max_tokens = 64  # the longest worked solution takes 53
  config.rollout.num_slots = 64
  config.pack.row_length = 160  # better filled than other lengths
  config.pack.rows_per_micro = 6
  config.optimizer.learning_rate = 1e-5  # low, to show the learning curve
  config.optimizer.clip_norm = 1e9  # a limit would bias pruned steps
  config.sft.steps = 1200
  config.eval.every = 10
  config.checkpoint.every = 100
  return config
