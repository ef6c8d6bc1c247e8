r"""Qwen3-30B-A3B, a mixture of 128 experts, on MATH.

  python -m dppo_jax.main --config=configs/qwen3_moe_math.py

The checkpoint and the data sets come from the Hugging Face hub. Experts, heads
and vocabulary are divided over four devices, everything else over the rest.

Hardware: one machine of eight GPUs of 141 GB. Compiled without one it takes 92
GiB on each in the update and 76 in the rollout, of 133; it does not fit 80 GB.
**It has never been run at this size**: hours and accuracy are unknown. Experts
that no token uses are skipped (dppo_jax/models/grouped.py). The code path is
tested with tiny checkpoints, also on meshes.
"""

from dppo_jax.config import Config, use_method


def get_config(method: str = "grpo") -> Config:
  config = Config()
  use_method(config, method)
  config.steps = 300
  config.model.hub_id = "Qwen/Qwen3-30B-A3B"
  config.model.dtype = "bfloat16"
  config.data.train = "hf:DigitalLearningGmbH/MATH-lighteval:default:train"
  config.data.eval = "hf:HuggingFaceH4/MATH-500:default:test"
  config.data.eval_limit = 0  # all 500
  config.data.template = (
    "{problem}\nReason step by step and put the final answer in \\boxed{{}}."
  )
  config.data.template_args = {"enable_thinking": False}
  config.data.max_prompt_tokens = 512
  config.data.prompts_per_step = 128
  config.reward.functions = "math"
  config.rollout.group_size = 8
  config.rollout.max_tokens = 2048
  config.rollout.num_slots = 0  # as many as fit
  config.pack.row_length = 4096
  config.pack.rows_per_micro = 1
  config.optimizer.learning_rate = 1e-6
  config.optimizer.warmup_steps = 10
  config.eval.every = 25
  config.checkpoint.every = 25
  config.mesh.data = -1  # all devices
  config.mesh.model = 4  # the number of key and value heads
  return config
