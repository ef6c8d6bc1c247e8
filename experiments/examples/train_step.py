"""Trains by the package's own step, without a config or a directory.

  python experiments/examples/train_step.py

A small Qwen3 with random weights learns to repeat a digit. `StepSpec` says all
about a step; the loop is the one of dppo_jax/train.py without logs, evaluations
and checkpoints.
"""

import jax

from dppo_jax import data, methods, rewards
from dppo_jax.algo import PackingSpec, objectives
from dppo_jax.models import parameters
from dppo_jax.models.config import ModelConfig
from dppo_jax.rng import rng_at
from dppo_jax.rollout import Sampling
from dppo_jax.step import (
  StepSpec,
  TrainStep,
  make_mesh,
  make_optimizer,
  new_train_state,
)

STEPS = 60


def starts_right(prompts, completions, answers, **columns):
  """Returns 1 for a completion that begins with the answer."""
  pairs = zip(completions, answers, strict=True)
  return [float(text.startswith(answer)) for text, answer in pairs]


def problems():
  """Returns the rows to train on."""
  return [{"problem": f"{x}=", "answer": str(x)} for x in range(10)] * 2


def main() -> list[float]:
  """Returns the mean reward of each step."""
  tokenizer = data.CharacterTokenizer()
  train_set, _ = data.load(tokenizer, seed=0, train=problems, eval="")
  spec = StepSpec(
    mesh=make_mesh(1),
    platform="cpu",
    root_key=jax.random.key(0),
    model=ModelConfig(
      vocab=tokenizer.vocab_size,
      embed=32,
      layers=1,
      heads=2,
      kv_heads=1,
      head_dim=16,
      mlp=64,
      has_qk_norm=True,
    ),
    method=methods.neyman(completion_budget=0.5),
    objective=objectives.grpo(),
    packing=PackingSpec(row_length=32, rows_per_micro=4),
    sampling=Sampling(max_tokens=3, stop_ids=tuple(tokenizer.stop_ids)),
    optimizer=make_optimizer(1e-2, STEPS),
    num_problems=len(train_set),
    prompt_tokens=train_set.tokens.shape[1],
    num_prompts=10,
    group_size=16,
  )
  history = []
  with jax.set_mesh(spec.mesh), rewards.Grader([starts_right]) as grader:
    step = TrainStep(spec, train_set, tokenizer, grader)
    params = parameters.init(spec.model, spec.root_key)
    state = new_train_state(spec, params)
    for number in range(STEPS):
      rng = rng_at(spec.root_key, number)
      state, experience = step.collect(state)
      batches = step.select(rng, experience, state)
      batches = step.score(rng, state.params, batches)
      state, updates = step.update(state, None, batches)
      info = step.info(state, experience, batches, updates)
      history.append(info.metrics(grader.specs)["reward/mean"])
      print(f"step {number + 1}: mean reward {history[-1]:.2f}")
  return history


if __name__ == "__main__":
  history = main()
