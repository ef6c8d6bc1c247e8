"""Trains the same model on the same prompts by tunix's GRPOLearner.

Runs in an environment with google-tunix, started by `run.py --stage=tunix`.
Prints nothing; writes the seconds, tokens and accuracy of each step, and the
peak memory, as JSON.
"""

import argparse
import functools
import importlib.metadata
import json
import pathlib
import resource
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import transformers
from tunix.models.llama3 import model as llama3
from tunix.models.llama3 import params
from tunix.rl import rl_cluster
from tunix.rl.grpo import grpo_learner
from tunix.rl.rollout import base_rollout

from dppo_jax.rewards import functions

END_OF_TURN = "<|im_end|>"
PADDING = "<|endoftext|>"


class Learner(grpo_learner.GRPOLearner):
  """Measures each optimizer step, with the rollout before it."""

  def begin(self) -> None:
    names = "seconds", "cpu_seconds", "accuracy", "generated"
    self.columns = {name: [] for name in names}
    self._start = time.monotonic(), time.process_time()

  def _run_global_step(self, *args):
    super()._run_global_step(*args)  # waits for the update
    now, start = (time.monotonic(), time.process_time()), self._start
    self.columns["seconds"].append(now[0] - start[0])
    self.columns["cpu_seconds"].append(now[1] - start[1])
    self._start = now


def read_model(path: pathlib.Path, mesh: jax.sharding.Mesh):
  """Returns the Llama model of a Hugging Face directory, in float32."""
  c = json.loads((path / "config.json").read_text())
  # 0.1.7 does not pass the base of the config on.
  llama3.apply_rope = functools.partial(
    llama3.apply_rope, rope_theta=int(c["rope_theta"])
  )
  config = llama3.ModelConfig(
    num_layers=c["num_hidden_layers"],
    vocab_size=c["vocab_size"],
    embed_dim=c["hidden_size"],
    hidden_dim=c["intermediate_size"],
    num_heads=c["num_attention_heads"],
    head_dim=c["head_dim"],
    num_kv_heads=c["num_key_value_heads"],
    rope_theta=int(c["rope_theta"]),
    norm_eps=c["rms_norm_eps"],
    weight_tying=c["tie_word_embeddings"],
  )
  return params.create_model_from_safe_tensors(
    str(path), config, mesh, dtype=jnp.float32
  )


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  for name in ("model", "prompts", "out"):
    parser.add_argument(f"--{name}", type=pathlib.Path, required=True)
  parser.add_argument("--rate", type=float, required=True)
  parser.add_argument("--seed", type=int, required=True)
  parser.add_argument("--micro", type=int, required=True)
  args = parser.parse_args()
  work = json.loads(args.prompts.read_text())
  tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)
  # tunix masks every padding token. By default the end of a turn is one, which
  # the chat template has in each prompt.
  tokenizer.pad_token = PADDING
  render = lambda problem: tokenizer.apply_chat_template(
    [{"role": "user", "content": problem}],
    tokenize=False,
    add_generation_prompt=True,
  )
  batches = [
    {
      "prompts": np.array([render(row["problem"]) for row in rows]),
      "answer": np.array([row["answer"] for row in rows]),
    }
    for rows in work["steps"]
  ]
  texts = [text for batch in batches for text in batch["prompts"]]
  longest = max(len(tokenizer.encode(text)) for text in texts)
  longest = 1 << (longest - 1).bit_length()
  num_prompts = work["batch"] // work["group_size"]
  mesh = jax.sharding.Mesh(
    np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp")
  )
  micro = args.micro // work["group_size"]  # it counts prompts
  cluster = rl_cluster.RLCluster(
    actor=read_model(args.model, mesh),
    tokenizer=tokenizer,
    cluster_config=rl_cluster.ClusterConfig(
      role_to_mesh={
        rl_cluster.Role[role]: mesh
        for role in ("ACTOR", "REFERENCE", "ROLLOUT")
      },
      training_config=rl_cluster.RLTrainingConfig(
        actor_optimizer=optax.chain(
          optax.clip_by_global_norm(work["clip_norm"]),
          optax.adamw(args.rate, weight_decay=0.0),
        ),
        eval_every_n_steps=len(batches) + 1,
        max_steps=len(batches),
        mini_batch_size=num_prompts,
        train_micro_batch_size=micro,
        rollout_micro_batch_size=num_prompts,
        compute_logps_micro_batch_size=micro,
      ),
      rollout_config=base_rollout.RolloutConfig(
        max_tokens_to_generate=work["max_tokens"],
        max_prompt_length=longest,
        kv_cache_size=longest + work["max_tokens"],
        temperature=1.0,
        top_p=1.0,
        top_k=None,
        seed=1000 * args.seed,
        eos_tokens=[tokenizer.convert_tokens_to_ids(END_OF_TURN)],
      ),
    ),
  )

  def reward(prompts, completions, answer, **unused):
    """Grades the completions of a step by the reward of our runs."""
    answers = [str(x) for x in answer]
    values = [float(x) for x in functions.last_number(completions, answers)]
    learner.columns["accuracy"].append(sum(values) / len(values))
    # Left as it is, the seed gives every step the same random numbers.
    cluster.cluster_config.rollout_config.seed += 1
    return values

  generate = cluster.generate

  def counted(*words, **options):
    out = generate(*words, **options)
    # With the stop token, which tunix cuts off.
    num = sum(min(len(x) + 1, work["max_tokens"]) for x in out.tokens)
    learner.columns["generated"].append(num)
    return out

  cluster.generate = counted
  learner = Learner(
    rl_cluster=cluster,
    algo_config=grpo_learner.GRPOConfig(
      num_generations=work["group_size"],
      num_iterations=1,
      beta=0.0,
      epsilon=0.2,
    ),
    reward_fns=reward,
  )
  learner.begin()
  learner.train(batches)
  peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
  names = "google-tunix", "jax", "flax"
  versions = {name: importlib.metadata.version(name) for name in names}
  result = {**learner.columns, "peak_bytes": peak, "versions": versions}
  args.out.write_text(json.dumps(result))


if __name__ == "__main__":
  main()
