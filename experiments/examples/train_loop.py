"""Trains a small model from scratch by GRPO with pruned completions.

  python experiments/examples/train_loop.py

A model of one layer learns to repeat three digits and to stop. It trains on an
eighth to a quarter of its completions, packed into rows behind one copy of
their prompt. Only what is named `dx` is part of the package.
"""

import jax
import jax.numpy as jnp
import optax

import dppo_jax as dx
from dppo_jax.records import Groups, PromptBatch, Rollout

# Prompts, completions of each, tokens of a prompt and of a completion, digits.
N, G, P, T, STOP = 16, 8, 3, 5, 8
ROW, ROWS = 32, dx.algo.row_bound(N * G // 4, P + T - 1, 32)


def model(params, tokens, positions, end):
  """Logits of packed rows; a query at q sees a key at k if k <= q < end[k]."""
  x = params["token"][tokens] + params["place"][positions]
  key = jnp.arange(tokens.shape[1])
  query = key[:, None]
  is_seen = (key <= query) & (query < end[:, None])
  scores = (x @ params["query"]) @ (x @ params["key"]).mT / 6
  scores = jnp.where(is_seen, scores, -1e9)
  return (x + jax.nn.softmax(scores) @ x @ params["value"]) @ params["head"]


def at(logprobs, tokens):
  """Each token's own log-probability."""
  return jnp.take_along_axis(logprobs, tokens[..., None], axis=2)[..., 0]


def sample(params, key, prompts):
  """T tokens after each prompt, and their log-probabilities: `[N, G, T]`."""
  tokens = jnp.pad(jnp.repeat(prompts, G, axis=0), ((0, 0), (0, T)))
  places = jnp.broadcast_to(jnp.arange(P + T), tokens.shape)
  end = jnp.full_like(tokens, P + T)
  logits = lambda tokens: model(params, tokens, places, end)

  def add(tokens, t):
    drawn = jax.random.categorical(jax.random.fold_in(key, t), logits(tokens))
    return jnp.where(places == t + 1, jnp.roll(drawn, 1, axis=1), tokens), None

  tokens, _ = jax.lax.scan(add, tokens, jnp.arange(P - 1, P + T - 1))
  logprobs = at(
    jax.nn.log_softmax(logits(tokens)[:, P - 1 : -1]), tokens[:, P:]
  )
  return tokens[:, P:].reshape(N, G, T), logprobs.reshape(N, G, T)


objective = dx.algo.grpo()
rule = dx.methods.neyman_completions(budget=0.25)
optimizer = optax.adam(5e-3)


@jax.jit
def step(params, opt_state, key):
  key_prompt, key_sample, key_choice = jax.random.split(key, 3)
  digits = jax.random.randint(key_prompt, (N, P), 0, STOP)
  tokens, logprobs = sample(params, key_sample, digits)
  # A completion ends with its first STOP; repeating the prompt earns 1.
  is_stop = tokens == STOP
  lengths = jnp.where(is_stop.any(2), is_stop.argmax(2) + 1, T)
  target = jnp.pad(digits, ((0, 0), (0, 1)), constant_values=STOP)
  rewards = (tokens[..., : P + 1] == target[:, None]).mean(2)

  advantages = dx.algo.group_normalized(rewards)
  chosen = rule(key_choice, Groups(rewards, advantages, lengths))
  weights = dx.algo.horvitz_thompson(chosen)

  prompts = PromptBatch(jnp.arange(N), digits, jnp.full(N, P))
  rollout = Rollout(prompts.ids, tokens, logprobs, lengths)
  rows, plan = dx.algo.pack_chosen(
    objective,
    prompts,
    rollout,
    advantages,
    weights,
    num_rows=ROWS,
    row_length=ROW,
  )

  def loss(params):
    logits = model(params, rows.tokens, rows.positions, rows.end)
    total, _ = dx.algo.surrogate(
      objective,
      at(jax.nn.log_softmax(logits), rows.targets),
      rows.old_logprobs,
      rows.advantages,
      rows.weights,
      rows.is_trained,
      rows.segment_ids,
    )
    return total / (N * G)

  updates, opt_state = optimizer.update(jax.grad(loss)(params), opt_state)
  params = optax.apply_updates(params, updates)
  return params, opt_state, rewards.mean(), plan.num_used


shapes = {"token": 9, "place": P + T, "query": 36, "key": 36, "value": 36}
*keys, head_key = jax.random.split(jax.random.key(0), 6)
normal = lambda key, *shape: 0.3 * jax.random.normal(key, shape)
params = {"head": normal(head_key, 36, 9)}
for key, (name, num_rows) in zip(keys, shapes.items(), strict=True):
  params[name] = normal(key, num_rows, 36)
opt_state = optimizer.init(params)
history = []
for key in jax.random.split(jax.random.key(1), 250):
  params, opt_state, reward, num_rows = step(params, opt_state, key)
  history.append(float(reward))
print(f"reward {history[0]:.2f} at first, {history[-1]:.2f} now")
