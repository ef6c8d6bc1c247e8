r"""SmolLM2-135M-Instruct, a pretrained chat model, on two CPU cores.

python -m dppo_jax.main --config=configs/smollm2.py
"""

from dppo_jax.config import Config, use_method


def get_config(method: str = "dppo") -> Config:
  config = Config()
  use_method(config, method)
  config.steps = 20
  config.model.hub_id = "HuggingFaceTB/SmolLM2-135M-Instruct"
  config.data.train = "dppo_jax.configs.word_problems:single"
  config.data.eval = "dppo_jax.configs.word_problems:single_test"
  config.data.max_prompt_tokens = 128
  config.data.prompts_per_step = 8
  config.reward.functions = "last_number"
  config.rollout.group_size = 8
  config.rollout.max_tokens = 40
  config.rollout.num_slots = 64
  config.pack.row_length = 256
  config.pack.rows_per_micro = 2
  config.optimizer.learning_rate = 1e-5
  config.eval.samples = 2
  config.eval.prompts = 32
  return config
