"""The steps that are compared with other systems; `run.py` fills in the paths.

  python -m dppo_jax.main --config=experiments/04_speed/peers/config.py:grpo \
    --config.model.path=DIR --config.data.train=FILE
"""

from dppo_jax.config import Config, use_method


def get_config(method: str = "grpo") -> Config:
  config = Config()
  use_method(config, method)
  config.model.remat = "none"
  config.data.prompts_per_step = 8
  config.data.max_prompt_tokens = 96
  config.data.eval = ""  # the others evaluate nothing either
  config.rollout.group_size = 8
  config.rollout.max_tokens = 128
  config.rollout.num_slots = 64
  config.pack.row_length = 896  # run.py tries others
  config.pack.rows_per_micro = 1
  config.optimizer.learning_rate = 1e-6
  config.optimizer.clip_norm = 1.0
  return config
