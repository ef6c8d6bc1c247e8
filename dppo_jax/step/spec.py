"""Specification of a training step."""

import dataclasses

import jax
import jax.numpy as jnp

from dppo_jax import sharding
from dppo_jax.algo.packing import PackingSpec
from dppo_jax.algo.policy_loss import Objective
from dppo_jax.errors import UserError
from dppo_jax.methods import Method
from dppo_jax.models import lm_head
from dppo_jax.models.config import ModelConfig
from dppo_jax.records import Rollout
from dppo_jax.rollout import Sampling
from dppo_jax.step.optimizer import Optimizer


@dataclasses.dataclass(frozen=True)
class StepSpec:
  """A training step as plain values, without config or files.

  The letters of shapes are those of `records`.

  Attributes:
    mesh: devices, not necessarily of this machine; abstract in a plan.
    platform: cpu, gpu or tpu, the kind of these devices.
    root_key: source of all randomness.
    model: architecture of the policy.
    method: rules that choose prompts, completions and tokens.
    objective: loss of a token, and advantages.
    packing: shape of a micro-batch.
    sampling: options of sampling a completion.
    stop_strings: texts that end a completion, which is cut after sampling.
    optimizer: optimizer of the policy; None if nothing is trained.
    num_problems: `M`, problems in the training set.
    prompt_tokens: `P`, the width of a batch of prompts.
    num_prompts: `N`, prompts drawn for a rollout.
    group_size: `G`, completions of each prompt.
    num_slots: completions that each device decodes at once; 0 for all.
    overlong_tokens: length of the soft overlong ramp, in tokens; 0 for none.
    mask_truncated: True if completions without a stop are not trained on.
    inner_updates: passes over one rollout.
    mini_batches: parts of a rollout, each an update of every pass. Update
      number `i`, and its batch, have part `i % mini_batches`.
    logit_chunk: positions whose logits the trainer holds at once.
  Raises:
    UserError: if something is trained and these do not fit each other; it names
      the options of a config.
  """

  mesh: sharding.AnyMesh
  platform: str
  root_key: jax.Array
  model: ModelConfig
  method: Method
  objective: Objective
  packing: PackingSpec
  sampling: Sampling
  optimizer: Optimizer | None
  num_problems: int
  prompt_tokens: int
  num_prompts: int
  group_size: int
  num_slots: int = 0
  stop_strings: tuple[str, ...] = ()
  overlong_tokens: int = 0
  mask_truncated: bool = False
  inner_updates: int = 1
  mini_batches: int = 1
  logit_chunk: int = lm_head.LOGIT_CHUNK

  def without_adapters(self) -> "StepSpec":
    """Returns the specification of a step that trains all weights."""
    model = dataclasses.replace(self.model, lora=None)
    return dataclasses.replace(self, model=model)

  def __post_init__(self):
    if not self.optimizer:
      return
    longest = self.prompt_tokens + self.sampling.max_tokens - 1
    if longest > self.packing.row_length:
      raise UserError(
        f"prompts, padded to {self.prompt_tokens} tokens, and completions of "
        f"{self.sampling.max_tokens} take {longest} tokens but a packed row "
        f"holds {self.packing.row_length}: raise config.pack.row_length, or "
        "lower config.rollout.max_tokens or config.data.max_prompt_tokens"
      )
    if self.num_prompts % self.mini_batches:
      raise UserError(
        f"config.data.prompts_per_step is {self.num_prompts} but must be a "
        f"multiple of config.objective.mini_batches, {self.mini_batches}"
      )
    ramp, limit = self.overlong_tokens, self.sampling.max_tokens
    if ramp > limit:
      raise UserError(
        f"config.reward.overlong_tokens is {ramp} but must be at most "
        f"config.rollout.max_tokens, {limit}"
      )
    dynamic_sampling = self.method.dynamic_sampling
    if dynamic_sampling and dynamic_sampling.is_exact:
      self._check_exact_sampling()

  def _check_exact_sampling(self) -> None:
    """Checks that the skipped groups would not have counted."""
    if self.num_prompts < 2:
      raise UserError(
        f"config.data.prompts_per_step is {self.num_prompts} but must be at "
        "least 2 for exact dynamic sampling"
      )
    if self.objective.has_kl:
      raise UserError(
        f"config.objective.args.beta is {self.objective.beta} but exact "
        "dynamic sampling skips groups with equal rewards, which would have "
        "counted: set it to 0, or config.method.args.dynamic_sampling to plain "
        "or none"
      )
    tokens, ones = jnp.zeros((2, 2, 2), jnp.int32), jnp.ones((2, 2), jnp.int32)
    rollout = Rollout(jnp.arange(2), tokens, tokens * 0.0, ones)
    longer = rollout.replace(lengths=ones.at[1, 1].set(2))
    shares = map(self.objective.token_share, (rollout, longer))
    if jnp.subtract(*shares)[0].any():
      raise UserError(
        "config.objective: the mean length of completions is unknown, since "
        "exact dynamic sampling skips groups: set "
        "config.objective.args.tokens_per_completion to a typical length, or "
        "config.method.args.dynamic_sampling to plain or none"
      )
    rewards = jnp.ones((2, self.group_size))
    if self.objective.advantage(rewards, rewards > 0).any():
      raise UserError(
        "config.objective: a group of equal rewards has an advantage other "
        "than 0, but exact dynamic sampling skips it: set "
        "config.method.args.dynamic_sampling to plain or none"
      )

  @property
  def num_updates(self) -> int:
    """Optimizer updates on one rollout."""
    return self.inner_updates * self.mini_batches

  @property
  def has_reference(self) -> bool:
    """True if a KL penalty needs a copy of the first weights.

    With adapters, the frozen weights are the reference.
    """
    return self.objective.has_kl and not self.model.lora

  @property
  def is_on_policy(self) -> bool:
    """True if a rollout has one update.

    The current log-probabilities, held constant, are then the old ones.
    """
    return self.num_updates == 1

  @property
  def needs_old_logprobs(self) -> bool:
    """True if the old log-probabilities take a pass before the first update.

    Else they are the sampler's own, which draws from the policy without top_k
    or top_p. A correction for the sampler compares both.
    """
    is_cut = self.sampling.top_k or self.sampling.top_p < 1
    is_unknown = bool(is_cut or self.objective.sampler_cap)
    return is_unknown and not self.is_on_policy
