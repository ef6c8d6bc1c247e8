"""A run as text: model, problems, sizes of its batches, and warnings."""

import math

from dppo_jax import config as configs
from dppo_jax import sharding
from dppo_jax.models import attention, gpu_library, hf, parameters
from dppo_jax.run.setup import Run


def description(run: Run, config: configs.Config) -> str:
  """Returns model, problems and batch sizes of a run, as text."""
  spec, m, p = run.spec, run.spec.model, run.spec.packing
  prompts, group_size = spec.num_prompts, spec.group_size
  parts = spec.mini_batches
  longest = run.train_set.tokens.shape[1] + spec.sampling.max_tokens - 1
  num_rows = p.num_rows(prompts // parts * group_size, longest)
  epoch, left_over = divmod(len(run.train_set), prompts)
  reports = [x.report for x in run.eval_sets.values()]
  adapters = []
  if m.lora:
    table = parameters.trainable_table(m).values()
    num_trained = sum(math.prod(x.shape) for x in table)
    adapters.append(
      f"lora: rank {m.lora.rank} on {', '.join(m.lora.targets)}, "
      f"{num_trained:,} parameters are trained; their learning rate is "
      "usually five to ten times that of full training"
    )
  return "\n".join(
    [
      f"model: {m.family}, {m.layers} layers of width {m.embed}, "
      f"{parameters.num_parameters(m):,} parameters, {m.dtype}; mesh "
      f"{sharding.describe(spec.mesh)}",
      *adapters,
      run.train_set.report,
      *(reports or ["eval: no problems"]),
      run.train_set.first_prompt,
      *warnings(run, config),
      f"step: {prompts} prompts x {group_size} sequences of at most "
      f"{longest} tokens, decoded in {spec.num_slots} slots a device",
      f"update: micro-batches of {p.rows_per_micro} rows x {p.row_length} "
      f"tokens, at most {num_rows // p.rows_per_micro} in an update; updates "
      f"per rollout: {spec.num_updates}",
      f"epoch: {epoch} steps; {left_over} prompts are left over (different "
      "ones each epoch)",
      f"method: {config.method.name}, objective {config.objective.name}, "
      f"{config.steps} steps",
    ]
  )


def warnings(run: Run, config: configs.Config) -> list[str]:
  """Returns lines on stop ids, lengths beyond the model's, and kernels."""
  is_chosen = config.rollout.stop_ids or not run.tokenizer
  lines = [] if is_chosen else [run.tokenizer.stop_warning]
  sets = [x for x in (run.train_set, *run.eval_sets.values()) if x]
  longest = max((int(x.lengths.max()) for x in sets), default=0)
  longest += run.spec.sampling.max_tokens
  limit = hf.max_positions(run.path) if run.path else longest
  if longest > limit:
    lines.append(
      f"the longest prompt and config.rollout.max_tokens are {longest:,} "
      f"tokens, but the model has {limit:,} positions "
      "(max_position_embeddings): other programs may reject such lengths"
    )
  return [*filter(None, lines), *kernels(run, config)]


def kernels(run: Run, config: configs.Config) -> list[str]:
  """Returns lines on the kernels of an accelerator, or why it has none."""
  model, platform = run.spec.model, run.spec.platform
  if platform == "cpu":
    return []
  reason = run.kernel_fault or attention.obstacle(run.shapes)
  if config.model.attention == "xla":
    reason = "config.model.attention=xla"
  why = f", plain XLA: {reason}" if reason else ""
  lines = [f"attention: {model.attention}{why}"]
  missing = gpu_library.obstacle(model.dtype, run.shapes.capability)
  if model.experts and platform == "gpu" and missing:
    lines.append(f"each expert multiplies every token: {missing}")
  return lines
