"""Records that travel between stages, and the letters that name their shapes.

`N` prompts drawn, `Q` prompts rolled out, `G` completions of each prompt,
`P` prompt tokens, `T` completion tokens, `R` packed rows of `L` positions each,
`M` problems in a data set.

A rollout has a fixed shape, so `Q` equals `N`, and the `kept.keep` of a pruned
prompt is False.
"""

from flax import struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

Scalar = Float[Array, ""]
IntScalar = Int[Array, ""]


class Selection(struct.PyTreeNode):
  """A choice, with the inclusion probability of every item.

  Attributes:
    prob: the item's inclusion probability, in (0, 1] wherever `keep` is True.
  """

  keep: Bool[Array, "..."]
  prob: Float[Array, "..."]

  @classmethod
  def every(cls, shape: tuple[int, ...]) -> "Selection":
    """Returns the choice of every item, with probability 1."""
    return cls(jnp.ones(shape, bool), jnp.ones(shape, jnp.float32))


class PromptBatch(struct.PyTreeNode):
  """Prompts of one step.

  Attributes:
    ids: `[N]`, row numbers of the data set; distinct, but that with dynamic
      sampling the draws of a step may pass the end of an epoch.
    tokens: `[N, P]`, each prompt at the left, padded at the right.
    lengths: `[N]`, tokens in each prompt, at least 1.
  """

  ids: Int[Array, "N"]
  tokens: Int[Array, "N P"]
  lengths: Int[Array, "N"]


class Rollout(struct.PyTreeNode):
  """Completions as they were sampled.

  `algo.fill` and objectives do not need the last three fields; without them
  every prompt is assumed to be kept.

  Attributes:
    tokens: `[Q, G, T]`; the stop token is the last of a stopped completion.
    logprobs: `[Q, G, T]`, nats, of the distribution that was sampled.
    lengths: `[Q, G]`, tokens in each completion, 0 for a pruned prompt.
    is_stopped: `[Q, G]`, True where a stop token ended the completion.
    kept: `[Q]`, the selection of prompts.
    slot_steps: decode slots times decode steps, of which each samples a token
      if the slot is busy.
  """

  prompt_ids: Int[Array, "Q"]
  tokens: Int[Array, "Q G T"]
  logprobs: Float[Array, "Q G T"]
  lengths: Int[Array, "Q G"]
  is_stopped: Bool[Array, "Q G"] | None = None
  kept: Selection | None = None
  slot_steps: Scalar | None = None

  @property
  def selection(self) -> Selection:
    """The selection of prompts: `kept`, or every prompt if that is None."""
    return self.kept or Selection.every(self.lengths.shape[:1])


class Groups(struct.PyTreeNode):
  """The input of a completion rule.

  Attributes:
    advantages: `[Q, G]`, from all G completions of each group.
    lengths: `[Q, G]`, tokens; 0 for the completions of a pruned prompt, and
      for masked ones.
    is_needed: `[Q, G]`, True where a completion contributes to the gradient;
      without a KL penalty one of zero advantage does not. None if unknown.
    scale: `[Q, G]`, factor on each token's loss before this choice: the
      objective's token share over the prompt's probability. None is 1.
    sum_sq_residual: `[Q, G]`, sum over tokens of (1 - p)^2 with p the sampling
      probability of each. None stands for the length.
  """

  rewards: Float[Array, "Q G"]
  advantages: Float[Array, "Q G"]
  lengths: Int[Array, "Q G"]
  is_needed: Bool[Array, "Q G"] | None = None
  scale: Float[Array, "Q G"] | None = None
  sum_sq_residual: Float[Array, "Q G"] | None = None


class CompletionSummary(struct.PyTreeNode):
  """Per-completion advantage, weight and length trained on, for logging.

  Attributes:
    advantages: `[Q, G]`, as used in the loss.
    weights: `[Q, G]`, 1 / probability, the prompt's included; 0 where pruned.
    trained_lengths: `[Q, G]`, tokens; 0 where not trained on.
  """

  advantages: Float[Array, "Q G"]
  weights: Float[Array, "Q G"]
  trained_lengths: Int[Array, "Q G"]


class PackedBatch(struct.PyTreeNode):
  """Sequences laid side by side in rows; each position predicts its target.

  Attributes:
    tokens: `[R, L]`, what the model reads.
    targets: `[R, L]`, what it should predict: the sequence's next token.
    positions: `[R, L]`, counted from 0 in each prompt with its completion.
    segment_ids: `[R, L]`, 1, 2, ... along a row; 0 is padding. A completion is
      a segment, and so is a prompt that several share.
    end: `[R, L]`, one past the last position that may attend to this one; 0 is
      padding. A query at `q` sees a key at `k` if and only if k <= q < end[k].
    is_trained: `[R, L]`, True where the target is a token of a completion.
    weights: `[R, L]`, constant factor on each token's loss; 0 if not chosen.
    old_logprobs: `[R, L]`, nats, of `targets` under the policy before the step:
      the sampler's or, after a scoring pass, the trainer's.
  """

  tokens: Int[Array, "*rows L"]
  targets: Int[Array, "*rows L"]
  positions: Int[Array, "*rows L"]
  segment_ids: Int[Array, "*rows L"]
  end: Int[Array, "*rows L"]
  is_trained: Bool[Array, "*rows L"]
  advantages: Float[Array, "*rows L"]
  weights: Float[Array, "*rows L"]
  old_logprobs: Float[Array, "*rows L"]


class TokenStats(struct.PyTreeNode):
  """Statistics of each token from one pass over the vocabulary; 0 if unneeded.

  Attributes:
    logprobs: `[R, L]`, nats, of the target.
    entropy: `[R, L]`, nats, of the distribution.
  """

  logprobs: Float[Array, "*rows L"]
  entropy: Float[Array, "*rows L"]


class TrainState(struct.PyTreeNode):
  """Everything a run carries from step to step; randomness is not part of it.

  Attributes:
    step: steps done.
    draws: batches of prompts drawn; more than `step` if steps draw again.
    params: master weights, or frozen ones with adapters (models/lora.py).
    opt_state: of the weights that are trained.
    history: per-problem memory of the method's prompt rule.
    noise: a `gradient_noise.Noise`; None if the method has no budget.
    budget: fraction of the needed completions that the next step trains on;
      None if the method has no budget.
  """

  step: IntScalar
  draws: IntScalar
  params: PyTree[jax.Array]
  opt_state: PyTree
  history: PyTree
  noise: PyTree = None
  budget: Scalar | None = None
