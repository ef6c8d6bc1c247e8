"""The default task with the options of the results.

Experiments 01, 02 and 09 to 12 were run with these. The config itself has a
higher rate since and no limit on the gradient's norm, and evaluates sampled
completions.
"""

import pathlib

from dppo_jax.config import Config
from dppo_jax.files import user_code

_CONFIG = pathlib.Path(__file__).parents[2] / "configs" / "arithmetic.py"


def get_config(method: str = "neyman") -> Config:
  config = user_code.load(f"{_CONFIG}:get_config")(method)
  config.optimizer.learning_rate = 2e-6
  config.optimizer.clip_norm = 1.0
  config.eval.samples = 0
  return config
