"""Chain arithmetic on two CPU cores: the whole program from nothing.

  python -m dppo_jax.main --config=configs/arithmetic.py
  python -m dppo_jax.main --config=configs/arithmetic.py:grpo
"""

from dppo_jax.config import Config, use_method


def get_config(method: str = "dppo") -> Config:
  config = Config()
  use_method(config, method)
  config.steps = 200
  config.model.remat = False  # the activations are small
  config.data.prompts_per_step = 16
  config.rollout.group_size = 8
  config.rollout.max_tokens = 64  # the longest worked solution takes 53
  config.rollout.num_slots = 64
  config.pack.row_length = 192
  config.pack.rows = 4
  config.pack.window = 128  # all of a step's sequences: the fullest rows
  config.optimizer.learning_rate = 1.5e-4
  config.warmup.steps = 600
  config.warmup.direct_share = 0.7  # it can show its work but seldom does
  config.eval.every = 10
  config.eval.prompts = 256
  config.checkpoint.every = 50
  return config
