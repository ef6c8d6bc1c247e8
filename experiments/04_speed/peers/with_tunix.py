"""The work done by tunix's GRPO learner."""

import json

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import transformers
from tunix.models.qwen3 import model as qwen3
from tunix.models.qwen3 import params
from tunix.rl import common, rl_cluster
from tunix.rl.grpo import grpo_learner
from tunix.rl.rollout import base_rollout

from . import clock, work


class Learner(grpo_learner.GRPOLearner):
  """Stamps the end of each optimizer step."""

  watch: clock.Clock

  def _run_global_step(self, *args):
    super()._run_global_step(*args)  # waits for the update
    self.watch.end()


def build(args, reward_fn, eos_ids=None) -> Learner:
  """A learner on the checkpoint; one rollout of all prompts a step.

  Args:
    eos_ids: what ends a completion; None is the tokenizer's.
  """
  path = str(args.work / "checkpoint")
  shape = work.MODEL
  mesh = jax.sharding.Mesh(
    np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp")
  )
  model = params.create_model_from_safe_tensors(
    path,
    qwen3.ModelConfig(
      num_layers=shape["num_hidden_layers"],
      vocab_size=shape["vocab_size"],
      embed_dim=shape["hidden_size"],
      hidden_dim=shape["intermediate_size"],
      num_heads=shape["num_attention_heads"],
      head_dim=shape["head_dim"],
      num_kv_heads=shape["num_key_value_heads"],
      rope_theta=int(shape["rope_parameters"]["rope_theta"]),
      norm_eps=1e-6,
      use_tied_embedding=True,
    ),
    mesh,
    dtype=jnp.float32,
  )
  micro = int(args.micro) // work.GROUP  # it counts prompts
  roles = ("ACTOR", "REFERENCE", "ROLLOUT")
  cluster = rl_cluster.RLCluster(
    actor=model,
    tokenizer=transformers.AutoTokenizer.from_pretrained(path),
    cluster_config=rl_cluster.ClusterConfig(
      role_to_mesh={rl_cluster.Role[role]: mesh for role in roles},
      training_config=rl_cluster.RLTrainingConfig(
        actor_optimizer=optax.chain(
          optax.clip_by_global_norm(work.CLIP_NORM),
          optax.adamw(work.LEARNING_RATE, weight_decay=0.0),
        ),
        eval_every_n_steps=args.steps + 1,
        max_steps=args.steps,
        mini_batch_size=work.PROMPTS,
        train_micro_batch_size=micro,
        rollout_micro_batch_size=work.PROMPTS,
        compute_logps_micro_batch_size=micro,
      ),
      rollout_config=base_rollout.RolloutConfig(
        max_tokens_to_generate=work.NEW,
        max_prompt_length=work.LONGEST,
        kv_cache_size=work.LONGEST + work.NEW,
        temperature=1.0,
        top_p=1.0,
        top_k=None,
        seed=1000 * args.seed,
        eos_tokens=eos_ids,
      ),
    ),
  )
  return Learner(
    rl_cluster=cluster,
    algo_config=grpo_learner.GRPOConfig(
      num_generations=work.GROUP, num_iterations=1, beta=0.0, epsilon=0.2
    ),
    reward_fns=reward_fn,
  )


def steps(args) -> None:
  watch = clock.Clock(args.out)

  def reward_fn(prompts, completions, **unused):
    lengths = [len(x.split()) for x in completions]  # without the stop token
    stops = sum(n < work.NEW for n in lengths)
    watch.add(generated=sum(lengths) + stops, trained=sum(lengths))
    # Left as it is, the seed gives every step the same random numbers.
    cluster.cluster_config.rollout_config.seed += 1
    return [work.reward(x) for x in completions]

  learner = build(args, reward_fn)
  learner.watch = watch
  cluster = learner.rl_cluster
  cluster.generate = watch.timed("rollout_seconds", cluster.generate)
  batches = work.prompts(args.work, args.seed)[: args.steps]
  learner.train([{"prompts": np.array(batch)} for batch in batches])


def check(args) -> None:
  data = work.sequences(args.work)
  learner = build(args, lambda prompts, completions, **unused: [0.0])
  cluster = learner.rl_cluster
  trainer = cluster.actor_trainer
  prompts = jnp.array(work.padded(data["prompts"], work.LONGEST, left=True))
  ids = jnp.array(work.padded(data["completions"], work.NEW))
  example = grpo_learner.TrainExample(
    prompt_ids=prompts,
    prompt_mask=prompts != work.PAD,
    completion_ids=ids,
    completion_mask=ids != work.PAD,
    advantages=jnp.array(data["advantages"]),
    ref_per_token_logps=None,
    old_per_token_logps=None,
  )

  @nnx.jit
  def norm(model, example):
    inputs = trainer.gen_model_input_fn(example)
    grads, _ = nnx.grad(trainer.loss_fn, has_aux=True)(model, **inputs)
    return optax.global_norm(grads)

  with cluster.cluster_config.role_to_mesh[rl_cluster.Role.ACTOR]:
    logprobs = common.compute_per_token_logps(
      *nnx.split(trainer.model), prompts, ids, work.PAD, work.EOS
    )
    texts = work.problems(args.work)[: work.PROMPTS]
    results = {
      "prompt_ids": [cluster.tokenizer.encode(x) for x in texts],
      "logprobs": logprobs.tolist(),
      "norm": float(norm(trainer.model, example)),
    }
  args.out.write_text(json.dumps(results))


def decode(args) -> None:
  """Samples a batch whose completions all have NEW tokens."""
  learner = build(args, lambda **unused: [0.0], eos_ids=[-1])
  texts = work.problems(args.work)[: work.PROMPTS]
  prompts = [x for x in texts for _ in range(work.GROUP)]

  def generate():
    out = learner.rl_cluster.generate(prompts)
    assert all(len(tokens) == work.NEW for tokens in out.tokens)

  args.out.write_text(json.dumps(clock.repeat(generate)))


if __name__ == "__main__":
  work.main(__doc__, steps, check, decode)
