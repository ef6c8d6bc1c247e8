r"""SmolLM2-135M-Instruct on word problems of two steps, after smollm2.py.

  python -m dppo_jax.main --config=configs/smollm2.py
  python -m dppo_jax.main --config=configs/smollm2_words.py

The first run learns problems of one step, and the second one starts from its
last weights: elsewhere than in runs/smollm2-dppo-seed0, name them by
--config.sft.from_run=RUN@60. Two fifths of the held-out problems take one step,
and three fifths two:

  Ben has 4 apples, buys 3 more and then loses 2. How many apples does Ben ...

Expect the accuracy on 100 held-out problems to go from 0.06 before both runs to
0.34 and then to 0.84 sampled, in half an hour on two cores
(experiments/15_real_model).
"""

from dppo_jax.configs import smollm2

from dppo_jax.config import Config


def get_config(method: str = "dppo") -> Config:
  config = smollm2.get_config(method)
  config.steps = 200
  config.data.train = "dppo_jax.configs.smollm2:words"
  config.data.eval = "dppo_jax.configs.smollm2:words_test"
  config.rollout.group_size = 8
  config.eval.every = 50
  config.sft.from_run = "runs/smollm2-dppo-seed0@60"
  return config
