r"""Llama-3.2-1B-Instruct on MATH, competition problems.

  python -m dppo_jax.main --config=configs/llama_math.py

The checkpoint and the data sets come from the Hugging Face hub, which asks for
a login that has accepted Meta's licence.

Hardware: one GPU of 80 GB, or a TPU slice; by calculation 35 GiB in the
update on one GPU, and 16 GiB and the cache in the rollout. **It has never been
run at this size**: hours and accuracy are unknown. The code path is tested with
tiny checkpoints.
"""

from dppo_jax.config import Config, use_method


def get_config(method: str = "grpo") -> Config:
  config = Config()
  use_method(config, method)
  config.steps = 300
  config.model.hub_id = "meta-llama/Llama-3.2-1B-Instruct"
  config.model.dtype = "bfloat16"
  config.data.train = "hf:DigitalLearningGmbH/MATH-lighteval:default:train"
  config.data.eval = "hf:HuggingFaceH4/MATH-500:default:test"
  config.data.eval_limit = 0  # all 500
  config.data.template = (
    "{problem}\nReason step by step and put the final answer in \\boxed{{}}."
  )
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
  return config
