"""Reading Hugging Face checkpoints: config.json and safetensors files."""

from collections.abc import Collection, Mapping
import json
import pathlib
from typing import Any

import huggingface_hub
import jax
import numpy as np
import safetensors

from dppo_jax.errors import UserError
from dppo_jax.models import transformer
from dppo_jax.models.hf import families
from dppo_jax.models.transformer import ModelConfig, Params

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
GENERATION = "generation_config.json"

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

HUB_SECONDS = 10  # timeout for a hub that does not answer


def fetch(hub_id: str) -> str:
  """Returns the directory of a hub's checkpoint, downloaded unless cached.

  Raises:
    UserError: if that fails, with the way to download the files by hand.
  """
  reason = None
  try:
    # First, since snapshot_download waits forever for a silent hub.
    huggingface_hub.model_info(hub_id, timeout=HUB_SECONDS)
  except Exception as error:  # the library's, its transport's or the system's
    reason = error
  try:
    return huggingface_hub.snapshot_download(
      hub_id,
      allow_patterns=["config.json", "model*.safetensors", INDEX, *COMPANIONS],
      local_files_only=reason is not None,
    )
  except Exception as error:
    reason = reason or error
    first_line = str(reason).partition("\n")[0]
    raise UserError(
      f"{hub_id!r} is not cached and cannot be downloaded "
      f"({type(reason).__name__}: {first_line}): where the hub is reachable, "
      f"run `hf download {hub_id} --local-dir DIR`; then pass "
      "--config.model.path=DIR"
    ) from None


def read_config(
  path: str, dtype: str = "float32", remat: str = "layers"
) -> ModelConfig:
  """Returns the model that the checkpoint in directory `path` describes.

  Args:
    dtype: dtype of the computation.
    remat: rematerialisation, a key of transformer.REMAT.

  Raises:
    UserError: if config.json is missing or describes no supported model.
  """
  path = pathlib.Path(path)
  if not path.is_dir():
    raise UserError(
      f"{str(path)!r} is not a directory: set config.model.path to one with "
      "config.json and *.safetensors, or set config.model.hub_id"
    )
  if not (path / "config.json").exists() and any(path.glob("*.gguf")):
    raise UserError(
      f"{path} holds GGUF files, which cannot be trained: set "
      "config.model.path to the original safetensors checkpoint"
    )
  settings = read_json(path / "config.json")
  try:
    return families.from_settings(settings, dtype, remat)
  except UserError as error:
    raise UserError(f"{path}: {error}") from None


def check(path: str) -> None:
  """Raises the errors of `load` without reading the weights."""
  config = read_config(path)
  _check_tensors(path, _open_tensors(pathlib.Path(path)), config)


def load(
  path: str,
  dtype: str = "float32",
  remat: str = "layers",
  shardings: Params | None = None,
) -> tuple[Params, ModelConfig]:
  """Returns float32 weights and the model of the checkpoint in `path`.

  The host holds one stacked weight at a time, in addition to placed ones.

  Args:
    dtype: dtype of the computation.
    remat: rematerialisation, a key of transformer.REMAT.
    shardings: sharding of each weight; None for the default device.

  Raises:
    UserError: if a file is missing or damaged, or if the tensors are not those
      that config.json implies.
  """
  config = read_config(path, dtype, remat)
  tensors = _open_tensors(pathlib.Path(path))
  _check_tensors(path, tensors, config)
  places = {} if shardings is None else transformer.flatten(shardings)
  flat = {}
  for name, p in transformer.parameter_table(config).items():
    weight = np.empty(p.shape, np.float32)
    for index, tensor in families.parts(name, p.shape):
      stored = tensors[tensor].get_tensor(tensor)
      weight[index] = families.from_file(name, stored, p.shape)
      if not np.isfinite(weight[index]).all():
        raise UserError(
          f"{path}: {tensor} has infinite or NaN values: download it again"
        )
    flat[name] = _place(weight, places.get(name))
  return transformer.unflatten(flat), config


def stored_dtype(path: str) -> str:
  """Returns the dtype of the embedding in the checkpoint's file."""
  name = families.TENSORS["embed"].name
  file = _open_tensors(pathlib.Path(path))[name]
  return FLOATS[file.get_slice(name).get_dtype()]


def _place(
  weight: np.ndarray, sharding: jax.sharding.Sharding | None
) -> jax.Array:
  if sharding is None:
    return jax.device_put(weight)
  # device_put would compare the weight across processes.
  return jax.make_array_from_callback(
    weight.shape, sharding, weight.__getitem__
  )


def _open_tensors(path: pathlib.Path) -> dict[str, safetensors.safe_open]:
  """Returns the open file of each tensor."""
  tensors = {}
  for file in _weight_files(path):
    try:
      opened = safetensors.safe_open(file, framework="numpy")
    except safetensors.SafetensorError as error:
      raise UserError(
        f"{file} is truncated, damaged or a git-lfs pointer ({error}): "
        "download it again"
      ) from None
    tensors |= dict.fromkeys(opened.keys(), opened)
  return tensors


def _weight_files(path: pathlib.Path) -> list[pathlib.Path]:
  if (path / WEIGHTS).is_file():
    return [path / WEIGHTS]
  if not (path / INDEX).is_file():
    hint = ""
    if any(path.glob("*.bin")):
      hint = ": convert its *.bin files with save_pretrained of transformers"
    raise UserError(f"{path} has neither {WEIGHTS} nor {INDEX}{hint}")
  weight_map = read_json(path / INDEX).get("weight_map")
  if not isinstance(weight_map, dict):
    raise UserError(f"{path / INDEX} has no weight_map: download it again")
  files = [path / str(name) for name in sorted(set(weight_map.values()))]
  for file in files:
    if file.parent != path or not file.is_file():
      raise UserError(f"{path} lacks {file.name}, which {INDEX} names")
  return files


def _check_tensors(
  path: str, tensors: Mapping[str, safetensors.safe_open], config: ModelConfig
) -> None:
  """Raises UserError unless the tensors are the model's."""
  embed, head = (families.TENSORS[name].name for name in ("embed", "head"))
  shapes = {}
  for name, file in tensors.items():
    stored = file.get_slice(name)
    if stored.get_dtype() not in FLOATS:
      raise UserError(
        f"{path} has {name} in {stored.get_dtype()}, which is not supported: "
        f"use {', '.join(FLOATS)}"
      )
    shapes[name] = tuple(stored.get_shape())
  if config.is_tied and head in shapes and embed in shapes:
    get = lambda name: tensors[name].get_tensor(name)
    if not np.array_equal(get(head), get(embed)):
      raise UserError(
        f"{path}: {head} differs from {embed}, but config.json sets "
        "tie_word_embeddings"
      )
    del shapes[head]
  # Old exports hold the rotary frequencies, which follow from config.json.
  shapes = {k: v for k, v in shapes.items() if not k.endswith(".inv_freq")}
  check_shapes(path, shapes, families.file_shapes(config))


def check_shapes(
  where: str,
  actual: Mapping[str, tuple[int, ...]],
  expected: Mapping[str, tuple[int, ...]],
) -> None:
  """Raises UserError if names or shapes differ."""
  if missing := expected.keys() - actual.keys():
    raise UserError(f"{where} lacks {_some(missing)}")
  if extra := actual.keys() - expected.keys():
    raise UserError(f"{where} has {_some(extra)}, unknown to the model")
  for name, shape in expected.items():
    if actual[name] != shape:
      raise UserError(
        f"{where} has {name} in shape {actual[name]}, but the model's is "
        f"{shape}"
      )


def _some(names: Collection[str]) -> str:
  """Returns up to five names, and the number of the others."""
  more = f" and {len(names) - 5} more" if len(names) > 5 else ""
  return ", ".join(sorted(names)[:5]) + more


def read_json(file: pathlib.Path) -> dict[str, Any]:
  """Returns the content of a JSON file of the checkpoint."""
  if not file.is_file():
    raise UserError(
      f"{file} does not exist: config.model.path must be a full checkpoint"
    )
  try:
    content = json.loads(file.read_text(encoding="utf-8"))
  except ValueError as error:
    raise UserError(
      f"{file} is not JSON ({error}): download it again"
    ) from None
  if not isinstance(content, dict):
    raise UserError(f"{file} is not a JSON object: download it again")
  return content
