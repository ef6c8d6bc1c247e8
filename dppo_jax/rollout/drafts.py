"""Drafts of speculative decoding: guesses of the tokens that come next.

A token is a function of the logits and of its random number. A step that reads
a slot's newest token and some drafts therefore samples, but for rounding, the
same tokens as one step after another, up to the first that differs from its
draft. Drafts come from the texts of the group, since its completions are alike.
"""

import jax.numpy as jnp
from jaxtyping import Array, Int

LONGEST = 4  # tokens of the longest match that is looked for
AUTOMATIC = 3  # drafts, if they are used while they make rollouts faster


def find(
  prompts: Int[Array, "B P"],
  prompt_lengths: Int[Array, "B"],
  groups: Int[Array, "B G T"],
  members: Int[Array, "B"],
  counts: Int[Array, "B"],
  num: int,
) -> Int[Array, "B num"]:
  """Returns the `num` tokens that followed the longest match, in each slot.

  A slot's newest tokens, at most `LONGEST`, are looked for in its prompt, in
  the completions of its group and in its own. The tokens after the longest
  match are the draft; the first completion wins a tie.

  >>> import jax.numpy as jnp
  >>> from dppo_jax.rollout import drafts
  >>> prompt, sibling, short = [9, 8, 7], [1, 2, 3, 4], [5, 2, -1, -1]
  >>> args = jnp.array([prompt]), jnp.array([3]), jnp.array([[sibling, short]])
  >>> print(drafts.find(*args, jnp.array([1]), jnp.array([2]), num=2))
  [[3 4]]

  Args:
    groups: tokens of the completions of each slot's prompt, so far; -1 beyond.
    members: the slot's completion among them.
    counts: its tokens so far.
  """
  batch, group_size, _ = groups.shape
  # A completion continues the last tokens of its prompt.
  back = jnp.arange(-LONGEST, 0, dtype=jnp.int32)
  at = prompt_lengths[:, None] + back
  ends = jnp.take_along_axis(prompts, jnp.maximum(at, 0), 1)
  ends = jnp.where(at >= 0, ends, -1)
  copies = jnp.broadcast_to(ends[:, None], (batch, group_size, LONGEST))
  rows = jnp.concatenate([copies, groups], 2)
  written = jnp.take_along_axis(rows, members[:, None, None], 1)[:, 0]
  newest = jnp.take_along_axis(written, counts[:, None] + LONGEST + back, 1)
  index = jnp.arange(prompts.shape[1], dtype=jnp.int32)
  prompt = jnp.where(index < prompt_lengths[:, None], prompts, -1)
  blank = jnp.full((batch, max(num, LONGEST)), -1, jnp.int32)
  parts = [blank, rows.reshape(batch, -1), prompt, blank]
  text = jnp.concatenate(parts, 1)

  # Tokens that match up to each place, if its successor is known.
  first, last = LONGEST, text.shape[1] - blank.shape[1]
  length, is_match = 0, text[:, first + 1 : last + 1] >= 0
  for i in range(LONGEST):
    is_match &= text[:, first - i : last - i] == newest[:, -1 - i, None]
    length += is_match.astype(jnp.int32)
  best = first + 1 + jnp.argmax(length, axis=1)
  ahead = jnp.arange(num, dtype=jnp.int32)
  return jnp.take_along_axis(text, best[:, None] + ahead, 1)
