"""What a step is made of: tokens, rows and turns, at stated lengths."""

import dataclasses
import math
from typing import NamedTuple

from dppo_jax import sharding
from dppo_jax.planning import shares
from dppo_jax.run.setup import Run

BUSY = 0.95  # share of decode slots that do something
_FILL = 0.95  # share of a packed row's positions in use


@dataclasses.dataclass(frozen=True)
class Assumptions:
  """What nobody knows before a run; each may be given with --assume.

  Attributes:
    prompt: mean tokens of a prompt; 0 is that of the problems, where they
      are made on the spot, and else a quarter of the longest.
    completion: mean tokens of a completion; 0 is half of the longest.
    zero_variance: share of prompts that are always right or always wrong.
    prompts_kept, completions_kept: shares rolled out and, of those, trained
      on; below 0 they are tried out on groups that are made up.
    update_cost: seconds of an update on all completions that are needed over
      the other seconds of a step, by which shares that set themselves do.
    compute, bandwidth, network: share of the stated figures that is reached.
  """

  prompt: float = 0.0
  completion: float = 0.0
  zero_variance: float = 0.25
  prompts_kept: float = -1.0
  completions_kept: float = -1.0
  update_cost: float = 1.0
  compute: float = 0.4
  bandwidth: float = 0.6
  network: float = 0.6


def parse(text: str) -> Assumptions:
  """`completion=700,zero_variance=0.5` over the defaults.

  Raises:
    ValueError: for a name that there is not, or a number out of range.
  """
  defaults = dataclasses.asdict(Assumptions())
  found = {}
  for word in filter(None, text.split(",")):
    name, _, value = (x.strip() for x in word.partition("="))
    if name not in defaults:
      raise ValueError(
        f"--assume has {name!r} but must be NAME=NUMBER, separated by commas, "
        f"where NAME is one of {', '.join(defaults)}"
      )
    try:
      found[name] = float(value)
    except ValueError:
      found[name] = math.nan
    most = 1.0
    if name in ("prompt", "completion", "update_cost"):
      most = math.inf
    least = 0.0 if name == "zero_variance" else 1e-3
    if not least <= found[name] <= most or math.isinf(found[name]):
      raise ValueError(
        f"--assume={name} is {value!r} but must be a number of at least "
        f"{least:g}" + (" and at most 1" if most == 1 else "")
      )
  return Assumptions(**found)


class Work(NamedTuple):
  """A step's work, over all devices unless said otherwise.

  Attributes:
    prompt, completion: mean tokens of one.
    rolled_out: prompts, those of further draws included.
    generated: tokens sampled.
    slots: that decode side by side on one shard of the batch.
    decode_steps: of each shard.
    trained: tokens whose log-probability is trained.
    in_rows: tokens of the packed rows in use, shared prompts once.
    micro_batches: turns of the update's loop.
    computed: positions of those micro-batches, padding included.
    pairs: of tokens that see each other, in the rows.
  """

  prompt: float
  completion: float
  rolled_out: float
  generated: float
  slots: int
  decode_steps: float
  trained: float
  in_rows: float
  micro_batches: int
  computed: float
  pairs: float
  shares: shares.Shares


def of_step(run: Run, given: Assumptions) -> Work:
  """The work of a step of this run under its method."""
  c, packing = run.config, run.packing
  width = run.train_set.tokens.shape[1]
  # Problems that were read say it themselves.
  mean = run.train_set.lengths.mean() if run.tokenizer else width / 4
  prompt = min(given.prompt or float(mean), width)
  most = c.rollout.max_tokens
  completion = min(given.completion or most / 2, most)
  group_size, num = c.rollout.group_size, c.data.prompts_per_step
  kept = shares.try_out(
    *(run.method, run.objective, group_size, given.zero_variance),
    *(c.steps // 2, given.update_cost),
  )
  if given.prompts_kept >= 0:
    kept = kept._replace(prompts=given.prompts_kept)
  if given.completions_kept >= 0:
    kept = kept._replace(completions=given.completions_kept)

  # Rollout: each shard of the batch drains its own share.
  num_shards = sharding.num_shards(run.mesh, "batch")
  rolled_out = num * kept.prompts * kept.draws
  generated = rolled_out * group_size * completion
  slots = num_slots(run)
  decode_steps = kept.draws * max(
    generated / kept.draws / num_shards / (slots * BUSY), most
  )

  # Update: the survivors of a group share one copy of their prompt.
  survivors = num * kept.prompts * group_size * kept.completions
  trained = survivors * completion
  copies = (
    num * kept.prompts * kept.mixed if packing.share_prefix else survivors
  )
  in_rows = trained + min(copies, survivors) * prompt
  rows = in_rows / (packing.row_length * _FILL)
  parts = c.objective.mini_batches  # each packed by itself
  micro_batches = parts * max(
    1, math.ceil(rows / parts / packing.rows_per_micro)
  )
  return Work(
    prompt=prompt,
    completion=completion,
    rolled_out=rolled_out,
    generated=generated,
    slots=slots,
    decode_steps=decode_steps,
    trained=trained,
    in_rows=in_rows,
    micro_batches=micro_batches,
    computed=micro_batches * packing.rows_per_micro * packing.row_length,
    pairs=survivors * completion * (prompt + completion / 2)
    + copies * prompt**2 / 2,
    shares=kept,
  )


def num_slots(run: Run) -> int:
  """Slots that decode side by side on one shard of the batch."""
  c = run.config
  prompts = c.data.prompts_per_step // sharding.num_shards(run.mesh, "batch")
  return min(c.rollout.num_slots, prompts * c.rollout.group_size)


def capacity(run: Run) -> int:
  """Positions of a decode slot's cache."""
  longest = run.train_set.tokens.shape[1] + run.config.rollout.max_tokens - 1
  return sharding.round_up(longest, 32)
