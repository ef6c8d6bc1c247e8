"""The run's attention kernel against plain XLA, before the first step.

Numbers are random; shapes and dtypes are those of the run on one device.
"""

from collections.abc import Iterator
import contextlib
import dataclasses
import functools
import hashlib
from importlib import metadata
import math
import pathlib

from etils import epath
import jax
import jax.numpy as jnp
from jaxtyping import Array
import numpy as np

from dppo_jax import distributed
from dppo_jax.algo import filling, packing
from dppo_jax.errors import UserError
from dppo_jax.models import attention, kv_cache
from dppo_jax.models.attention import decode_kernel
from dppo_jax.step.spec import StepSpec

# Largest `_difference` in bfloat16 and, as TPUs round the factors of products
# to it, in float32. Roundings make up to 0.006, a wrong scale 0.4.
TOLERANCE = 2e-2
_SLOTS = 8  # of the decode step: others are computed alike
_GROUPS = 2
_PACKAGES = (
  *("jax", "jaxlib", "libtpu", "tokamax"),
  *(f"jax-cuda{x}-{part}" for x in (12, 13) for part in ("plugin", "pjrt")),
)
# Name of a result, what the kernel computed, and what plain XLA did.
Result = tuple[str, Array, Array]


def checked(spec: StepSpec, option: str) -> tuple[StepSpec, str]:
  """Returns a specification in plain XLA and the reason if its kernel fails.

  Otherwise returns the same specification and no reason. A kernel that passes
  is remembered in the directory of the compilation cache.

  Args:
    option: config.model.attention.
  Raises:
    UserError: if the kernel fails and `option` names it.
  """
  if spec.model.attention not in attention.KERNELS:
    return spec, ""
  memory, has_passed, reason = _memory(spec), False, ""
  with contextlib.suppress(OSError):  # the cache cannot be read
    has_passed = memory is not None and memory.exists()
  if not has_passed:
    try:
      text = judge(spec)
      if memory:
        with contextlib.suppress(OSError):  # the cache cannot be written
          memory.parent.mkdir(parents=True, exist_ok=True)
          memory.write_text(text)
    except UserError as error:
      reason = str(error)
  # Of several processes, all use the kernel or none.
  reason = next(filter(None, distributed.gather(reason)), "")
  if not reason:
    return spec, ""
  if option in attention.KERNELS:
    raise UserError(
      f"config.model.attention={option} is wrong on this device: {reason}; "
      "set it to auto"
    )
  plain = attention.plain(spec.platform, spec.packing.row_length)
  model = dataclasses.replace(spec.model, attention=plain)
  return dataclasses.replace(spec, model=model), reason


def judge(spec: StepSpec) -> str:
  """Compares a packed row, prompts and a decode step with plain XLA.

  The row has two groups, and is compared forward and backward.

  Returns:
    The largest error, as text.
  Raises:
    UserError: for an error above `TOLERANCE`, or a kernel that cannot run.
  """
  name, largest = spec.model.attention, 0.0
  for where, compare in _PARTS.items():
    try:
      differences = [
        (x, float(_difference(*pair))) for x, *pair in compare(spec)
      ]
    except Exception as error:  # the compiler's, or the device's
      line = str(error).strip().partition("\n")[0] or type(error).__name__
      raise UserError(f"{name} cannot compute {where}: {line[:200]}") from error
    for result, difference in differences:
      if not difference <= TOLERANCE:  # or not a number
        raise UserError(
          f"{name} differs from plain XLA by {difference:.2g} in the {result} "
          f"of {where}, above {TOLERANCE:g}"
        )
      largest = max(largest, difference)
  return (
    f"{name} differs from plain XLA by at most {largest:.1g} (limit "
    f"{TOLERANCE:g})"
  )


def _row(spec: StepSpec) -> Iterator[Result]:
  """Yields the output and the gradients of a packed row of two groups."""
  model, length = spec.model, spec.packing.row_length
  layout = example_row(length, spec.group_size)
  end = attention.seen_by_itself(layout.end)
  plain = attention.plain(spec.platform, length)
  if plain == model.attention:  # --mode=check
    plain = "xla_dense"
  q, k, v, noise = _random(spec, 1, length)
  windows: list[tuple | None] = [None]
  if model.local and model.local.window:
    oldest = layout.positions - model.local.window + 1
    windows.append((layout.positions, oldest))
  real = lambda x: jnp.where(layout.is_real[..., None, None], x, 0)

  def results(backend, window):
    @jax.jit
    def with_gradients(*inputs):
      attend = lambda q, k, v: attention.attention(
        q, k, v, end, backend, window
      )
      out, pull = jax.vjp(attend, *inputs)
      return [real(x) for x in (out, *pull(real(noise)))]

    return with_gradients(q, k, v)

  inputs = ("queries", "keys", "values")
  names = "output", *(f"gradient of the {x}" for x in inputs)
  for window in windows:
    actual, wanted = (results(x, window) for x in (model.attention, plain))
    yield from zip(names, actual, wanted, strict=True)


def _prompts(spec: StepSpec) -> Iterator[Result]:
  """Yields the attention of padded prompts."""
  model, width = spec.model, spec.prompt_tokens or spec.packing.row_length
  q, k, v, _ = _random(spec, _GROUPS, width)
  lengths = jnp.array([width, -(-width // 3)], jnp.int32)
  actual, wanted = (
    jax.jit(functools.partial(attention.attend_prompts, backend=x))(
      q, k, v, lengths
    )
    for x in (model.attention, "xla")
  )
  is_real = jnp.arange(width, dtype=jnp.int32) < lengths[:, None]
  real = lambda x: jnp.where(is_real[..., None, None], x, 0)
  yield "output", real(actual), real(wanted)


def _decode(spec: StepSpec) -> Iterator[Result]:
  """Yields the decode kernel's output and cache; nothing without it."""
  model, width = spec.model, spec.prompt_tokens or spec.packing.row_length
  if not model.shares_prompts:
    return
  (slot_size,), (prompt_size,) = kv_cache.slot_and_prompt_sizes(
    model, width, spec.sampling.max_tokens
  )
  q, k, v = (x[:, 0] for x in _random(spec, _SLOTS, 1)[:3])
  as_cache = lambda rows, size: tuple(
    x.swapaxes(1, 2)[None] for x in _random(spec, rows, size)[1:3]
  )
  cache, prompts = as_cache(_SLOTS, slot_size), as_cache(_GROUPS, prompt_size)
  slot = jnp.arange(_SLOTS, dtype=jnp.int32)
  row, last = slot % _GROUPS, _SLOTS - 1
  count = (spec.sampling.max_tokens - 1) * slot // last
  before = (width - 1) * (last - slot) // last
  # A new function, which is traced again.
  out, written = jax.jit(functools.partial(decode_kernel.attend))(
    q, k, v, cache, prompts, jnp.int32(0), slot, row, before + count, count
  )
  keys, values = (
    jnp.concatenate([x[0, row], y[0], z[:, :, None]], 2).swapaxes(1, 2)
    for x, y, z in zip(prompts, cache, (k, v), strict=True)
  )
  sizes = (prompt_size, before), (slot_size, count), (1, slot + 1)
  mask = [jnp.arange(size) < num[:, None] for size, num in sizes]
  wanted = jax.nn.dot_product_attention(
    q[:, None], keys, values, mask=jnp.concatenate(mask, 1)[:, None, None]
  )
  yield "output", out, wanted[:, 0]
  for name, actual, old, new in zip(
    ("keys", "values"), written, cache, (k, v), strict=True
  ):
    yield f"written {name}", actual, old.at[0, slot, :, count].set(new)


_PARTS = {
  "a packed row": _row,
  "two prompts": _prompts,
  "a decode step": _decode,
}


def example_row(row_length: int, group_size: int) -> filling.RowLayout:
  """Returns a packed row `[1, L]` of two groups and padding."""
  num = row_length * 15 // 16 // _GROUPS
  prefix = num // 3
  size = min(group_size, num - prefix)
  lengths = 1 + np.random.default_rng(0).multinomial(
    num - prefix - size, np.full(size, 1 / size), size=_GROUPS
  )

  @jax.jit
  def lay_out(counts):
    plan = packing.plan(counts, row_length, num_rows=1, window=2 * size)
    return filling.lay_out(plan, counts, 1, row_length)

  prefixes = np.full(_GROUPS, prefix, np.int32)
  return lay_out(packing.TokenCounts(prefixes, lengths.astype(np.int32)))


def _random(spec: StepSpec, rows: int, length: int):
  """Returns queries, keys, values and noise like queries, of one device."""
  model, shards = spec.model, spec.mesh.shape["model"]
  heads, kv_heads = model.heads // shards, model.kv_heads
  kv_heads = math.lcm(kv_heads, shards) // shards  # repeated if too few
  keys = jax.random.split(jax.random.key(length), 4)
  return tuple(
    jax.random.normal(key, (rows, length, num, model.head_dim), model.dtype)
    for key, num in zip(keys, (heads, kv_heads, kv_heads, heads), strict=True)
  )


@jax.jit
def _difference(actual: Array, wanted: Array) -> Array:
  """Returns the largest distance of a head's vector from what is wanted.

  Distances are relative to the vector's length plus the root mean square of
  the lengths: one wrong block shows, and a vector near 0 does not.
  """
  actual, wanted = (x.astype(jnp.float32) for x in (actual, wanted))
  norm = lambda x: jnp.linalg.norm(x, axis=-1)
  size = norm(wanted)
  typical = jnp.sqrt(jnp.square(size).sum() / (size > 0).sum(dtype=jnp.float32))
  return (norm(actual - wanted) / (size + typical)).max()


def versions() -> dict[str, str]:
  """Returns the versions of the packages that compile and run kernels."""
  names = {}
  for name in _PACKAGES:
    with contextlib.suppress(metadata.PackageNotFoundError):
      names[name] = metadata.version(name)
  return names


def _memory(spec: StepSpec) -> epath.Path | None:
  """Returns the file that exists if the kernel has passed; None if nowhere."""
  folder = jax.config.jax_compilation_cache_dir
  if not folder:
    return None
  device = spec.mesh.local_devices[0]
  sources = sorted(pathlib.Path(attention.__file__).parent.glob("*.py"))
  facts = (
    *(versions(), device.device_kind, device.client.platform_version),
    *(x.read_text(encoding="utf-8") for x in sources),
    *(spec.model, spec.packing, spec.sampling),
    *(spec.group_size, spec.prompt_tokens, spec.mesh.shape["model"]),
  )
  digest = hashlib.sha256(repr(facts).encode()).hexdigest()
  return epath.Path(folder) / f"attention-{digest[:16]}.txt"
