"""Reading Hugging Face checkpoints: config.json and safetensors files."""

from collections.abc import Mapping
import pathlib
from typing import Any

import huggingface_hub
import jax
from jaxtyping import PyTree
import numpy as np
import safetensors

from dppo_jax import errors
from dppo_jax.errors import UserError
from dppo_jax.files import json_object
from dppo_jax.models import parameters
from dppo_jax.models.config import ModelConfig
from dppo_jax.models.hf import families
from dppo_jax.models.parameters import Params

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
GENERATION = "generation_config.json"
_HINT = (
  "config.model.path must be the directory of a full checkpoint with "
  "config.json and *.safetensors"
)

# Glob patterns of the other files of a checkpoint.
COMPANIONS = (
  GENERATION,
  "tokenizer*",
  "special_tokens_map.json",
  "added_tokens.json",
  "vocab.json",
  "merges.txt",
  "chat_template*",
  "LICENSE*",
)

# Stored dtypes, which float32 holds without loss, and their NumPy names.
FLOATS = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}

_EMBED, _HEAD = (families.TENSORS[x].name for x in ("embed", "head"))
_TEXT = "language_model."  # marks the tensors of a model's text part

# Tensors of open files by their names, read when they are sliced.
Stored = Mapping[str, Any]

HUB_SECONDS = 10  # timeout for a hub that does not answer


def fetch(hub_id: str) -> str:
  """Returns the directory of a hub's checkpoint, downloaded unless cached.

  Args:
    hub_id: OWNER/NAME or OWNER/NAME@REVISION, a branch, tag or commit.
  """
  reason: Exception | None = None
  name, _, revision = hub_id.partition("@")
  try:
    # First, since snapshot_download waits forever for a silent hub.
    huggingface_hub.model_info(
      name, revision=revision or None, timeout=HUB_SECONDS
    )
  except Exception as error:  # the library's, its transport's or the system's
    reason = error
  try:
    return huggingface_hub.snapshot_download(
      name,
      revision=revision or None,
      allow_patterns=["config.json", "model*.safetensors", INDEX, *COMPANIONS],
      local_files_only=reason is not None,
    )
  except Exception as error:
    reason = reason or error
    if pathlib.Path(hub_id).exists():
      raise UserError(
        f"config.model.hub_id {hub_id!r} is no model of the hub but a path: "
        "pass it as config.model.path"
      ) from None
    raise errors.of_server(
      reason,
      f"cannot fetch {hub_id} ({errors.first_line(reason)}): where "
      f"the hub is reachable, run `hf download {name} --local-dir DIR`; then "
      "pass --config.model.path=DIR, as for any directory",
    ) from None


def read_config(
  path: str | pathlib.Path, dtype: str = "float32", remat: str = "layers"
) -> ModelConfig:
  """Returns the model of the checkpoint in directory `path`."""
  if not pathlib.Path(path).is_dir():
    raise UserError(f"config.model.path: there is no directory {path}")
  settings = json_object.read(pathlib.Path(path, "config.json"), hint=_HINT)
  try:
    return families.from_settings(settings, dtype, remat)
  except UserError as error:
    raise UserError(f"{path}: {error}") from None


def check(path: str | pathlib.Path) -> None:
  """Raises the errors of `load`, without reading all weights, but for NaN."""
  _open_model(path, read_config(path))


def load(
  path: str | pathlib.Path,
  dtype: str = "float32",
  remat: str = "layers",
  shardings: PyTree | None = None,
  param_dtype: str = "float32",
) -> tuple[Params, ModelConfig]:
  """Returns the weights and the model of the checkpoint in `path`.

  The host holds one stacked weight at a time, in addition to placed ones.

  Args:
    dtype, remat: of the computation.
    shardings: sharding of each weight; None for the default device.
    param_dtype: dtype of the weights.
  """
  config = read_config(path, dtype, remat)
  tensors = _open_model(path, config)
  table = parameters.parameter_table(config)
  return read_table(path, tensors, table, shardings, param_dtype), config


def read_table(
  path: str | pathlib.Path,
  tensors: Stored,
  table: Mapping[str, parameters.Param],
  shardings: PyTree | None,
  dtype: str,
) -> Params:
  """Returns the declared weights, read from the file of each tensor."""
  places = {} if shardings is None else parameters.flatten(shardings)
  default = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
  flat = {}
  for name, p in table.items():
    weight = np.empty(p.shape, np.float32)
    for index, tensor in families.tensors(name, p.shape):
      stored = tensors[tensor][:]
      weight[index] = families.from_file(name, stored, p.shape)
      if not np.isfinite(weight[index]).all():
        raise UserError(
          f"{path}: {tensor} has infinite or NaN values: download it again"
        )
    weight = weight.astype(dtype, copy=False)
    # device_put would compare the weight across processes.
    flat[name] = jax.make_array_from_callback(
      p.shape, places.get(name, default), weight.__getitem__
    )
  return parameters.unflatten(flat)


def has_images(path: str | pathlib.Path) -> bool:
  """Returns True for a checkpoint with images: only its text part is read."""
  settings = json_object.read(pathlib.Path(path, "config.json"), hint=_HINT)
  return families.text_settings(settings) is not settings


def max_positions(path: str | pathlib.Path) -> int:
  """Returns the number of positions that a checkpoint was made for."""
  settings = json_object.read(pathlib.Path(path, "config.json"), hint=_HINT)
  key = "max_position_embeddings"
  text = json_object.check(families.text_settings(settings), {key: int | None})
  return text.get(key) or 2**31


def stored_dtype(path: str | pathlib.Path) -> str:
  """Returns the dtype of the embedding in the checkpoint's file."""
  tensors = _open_model(path, read_config(path))
  return FLOATS[tensors[_EMBED].get_dtype()]


def open_tensors(path: str | pathlib.Path, weights: str = WEIGHTS) -> Stored:
  """Returns each tensor by its name in a model of text alone.

  In a checkpoint of a model with images, the text part's tensors have a further
  `language_model` in their names, in one of two places.

  Args:
    weights: name of the file; WEIGHTS may be several files with an index.
  """
  path, files = pathlib.Path(path), [weights]
  if not (path / weights).is_file():
    if not (path / INDEX).is_file():
      raise UserError(
        f"config.model.path {path} has neither {WEIGHTS} nor {INDEX}"
      )
    index = json_object.read(path / INDEX, {"weight_map": dict[str, str]})
    files = sorted(set(index["weight_map"].values()))
  tensors: dict[str, Any] = {}
  for file in files:
    try:
      opened = safetensors.safe_open(path / file, framework="numpy")
    except (OSError, safetensors.SafetensorError) as error:
      raise UserError(
        f"{path / file} is missing, truncated, damaged or a git-lfs pointer "
        f"({error}): download it again"
      ) from None
    tensors |= {name: opened.get_slice(name) for name in opened.keys()}
  text = {k: x for k, x in tensors.items() if _TEXT in k}
  if text and _HEAD in tensors:
    text[_HEAD] = tensors[_HEAD]
  tensors = text or tensors
  for name, tensor in tensors.items():
    if (dtype := tensor.get_dtype()) not in FLOATS:
      raise UserError(
        f"{path} has {name} in {dtype}, which is not supported: use "
        f"{', '.join(FLOATS)}"
      )
  return {k.replace(_TEXT, ""): x for k, x in tensors.items()}


def _open_model(path: str | pathlib.Path, config: ModelConfig) -> Stored:
  """Opens the tensors; raises UserError unless they are the model's."""
  # Old exports hold the rotary frequencies, which follow from config.json.
  tensors = {
    name: tensor
    for name, tensor in open_tensors(path).items()
    if not name.endswith(".inv_freq")
  }
  if config.is_tied and _HEAD in tensors:
    head = tensors.pop(_HEAD)
    if not np.array_equal(tensors.setdefault(_EMBED, head)[:], head[:]):
      raise UserError(
        f"{path}: {_HEAD} differs from {_EMBED}, and transformers uses it: set "
        "tie_word_embeddings to false in config.json"
      )
  compare_shapes(path, tensors, parameters.parameter_table(config))
  return tensors


def compare_shapes(
  path: str | pathlib.Path,
  tensors: Stored,
  table: Mapping[str, parameters.Param],
) -> None:
  """Raises UserError unless the tensors' shapes are the declared ones."""
  shapes = {name: tuple(x.get_shape()) for name, x in tensors.items()}
  expected = {
    tensor: families.file_shape(name, p.shape)
    for name, p in table.items()
    for _, tensor in families.tensors(name, p.shape)
  }
  if wrong := sorted({x for x, _ in shapes.items() ^ expected.items()}):
    more = f" ({len(wrong) - 1} more differ)" if wrong[1:] else ""
    raise UserError(
      f"{path}: {wrong[0]} is {shapes.get(wrong[0], 'missing')}, but must be "
      f"{expected.get(wrong[0], 'absent')}{more}"
    )
