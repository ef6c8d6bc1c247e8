"""Reading Hugging Face checkpoints: config.json beside safetensors files."""

from collections.abc import Collection, Mapping
import json
import pathlib
import re
from typing import Any

import huggingface_hub
import jax
import numpy as np
import safetensors

from dppo_jax.models import transformer
from dppo_jax.models.hf import families
from dppo_jax.models.transformer import ModelConfig, Params

__all__ = ["check", "fetch", "load", "read_config", "stored_dtype"]

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
GENERATION = "generation_config.json"

# Glob patterns of what else a checkpoint needs to be used.
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

# Stored dtypes, which float32 holds without loss, and what NumPy calls them.
FLOATS = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}

_FILE_NAME = re.compile(r"[^/\\]*[^/\\.][^/\\]*")  # no path

HUB_SECONDS = 10  # how long to wait for a hub that does not answer


def fetch(hub_id: str) -> str:
  """The directory of a hub's checkpoint, downloaded where it is not cached.

  Raises:
    ValueError: where that fails, saying how to get the files by hand.
  """
  reason = None
  try:
    # Asked first, since snapshot_download waits forever for a silent hub.
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
    raise ValueError(
      f"{hub_id!r} is not cached and cannot be downloaded "
      f"({type(reason).__name__}: {first_line}): where the hub is reachable, "
      f"run `hf download {hub_id} --local-dir DIR`; then pass "
      "--config.model.path=DIR, which must hold config.json, *.safetensors "
      "and the tokenizer's files"
    ) from None


def read_config(
  path: str, dtype: str = "float32", remat: str = "layers"
) -> ModelConfig:
  """The model that the checkpoint in directory `path` describes.

  Args:
    dtype: of the computation.
    remat: the remat policy, a key of transformer.REMAT.

  Raises:
    ValueError: where there is no config.json, where it lacks a key, or where
      it asks for something that is not implemented.
  """
  path = pathlib.Path(path)
  if not path.is_dir():
    raise ValueError(
      f"there is no directory {str(path)!r}: set config.model.path to one "
      "with config.json and *.safetensors, or config.model.hub_id"
    )
  if not (path / "config.json").exists() and any(path.glob("*.gguf")):
    raise ValueError(
      f"{path} holds GGUF files, which cannot be trained: set "
      "config.model.path to the checkpoint that they were made from, with "
      "config.json, *.safetensors and the tokenizer's files"
    )
  settings = read_json(path / "config.json")
  try:
    return families.from_settings(settings, dtype, remat)
  except ValueError as error:
    raise ValueError(f"{path}: {error}") from None


def check(path: str) -> None:
  """Raises what `load` would raise, without reading the weights.

  Raises:
    ValueError: as `load` does.
  """
  config = read_config(path)
  _check_tensors(path, _open_tensors(pathlib.Path(path)), config)


def load(
  path: str,
  dtype: str = "float32",
  remat: str = "layers",
  shardings: Params | None = None,
) -> tuple[Params, ModelConfig]:
  """Float32 weights and the model of the checkpoint in directory `path`.

  The host holds one stacked weight at a time besides those already placed.

  Args:
    dtype: of the computation.
    remat: the remat policy, a key of transformer.REMAT.
    shardings: where each weight goes; None is the default device.

  Raises:
    ValueError: where a file is missing or damaged, or where the tensors are
      not those that config.json implies.
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
        raise ValueError(
          f"{path} has {tensor} with values that are infinite or NaN: fetch it "
          "again"
        )
    flat[name] = _place(weight, places.get(name))
  return transformer.unflatten(flat), config


def stored_dtype(path: str) -> str:
  """The dtype of the embedding's file, where `check` has passed `path`."""
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
  """The open file of each tensor."""
  tensors = {}
  for file in _weight_files(path):
    try:
      opened = safetensors.safe_open(file, framework="numpy")
    except safetensors.SafetensorError as error:
      raise ValueError(
        f"{file} is damaged, cut short or a git-lfs pointer ({error}): "
        "fetch it again"
      ) from None
    tensors |= dict.fromkeys(opened.keys(), opened)
  return tensors


def _weight_files(path: pathlib.Path) -> list[pathlib.Path]:
  if (path / WEIGHTS).is_file():
    return [path / WEIGHTS]
  if not (path / INDEX).is_file():
    hint = ""
    if any(path.glob("*.bin")):
      hint = "; convert its *.bin files with save_pretrained of transformers"
    raise ValueError(f"{path} has neither {WEIGHTS} nor {INDEX}{hint}")
  index = read_json(path / INDEX)
  if "weight_map" not in index:
    raise ValueError(f"{path / INDEX} lacks 'weight_map'")
  names = index["weight_map"]
  names = [*names.values()] if isinstance(names, dict) else [None]
  for name in names:
    # Files beside it alone; they may be links, as in the hub's cache.
    if not isinstance(name, str) or not _FILE_NAME.fullmatch(name):
      raise ValueError(
        f"{path / INDEX}: weight_map must name files beside it, not {name!r}: "
        "fetch it again"
      )
  names = set(names)
  missing = {name for name in names if not (path / name).is_file()}
  if missing:
    raise ValueError(f"{path} lacks {_some(missing)}, named by {INDEX}")
  return [path / name for name in sorted(names)]


def _check_tensors(
  path: str, tensors: Mapping[str, safetensors.safe_open], config: ModelConfig
) -> None:
  """Raises, before any is read, for tensors that are not the model's."""
  embed, head = (families.TENSORS[name].name for name in ("embed", "head"))
  shapes = {}
  for name, file in tensors.items():
    stored = file.get_slice(name)
    if stored.get_dtype() not in FLOATS:
      raise ValueError(
        f"{path} has {name} in {stored.get_dtype()}, which is not "
        f"implemented: only {', '.join(FLOATS)} are"
      )
    shapes[name] = tuple(stored.get_shape())
  if config.is_tied and head in shapes and embed in shapes:
    get = lambda name: tensors[name].get_tensor(name)
    if not np.array_equal(get(head), get(embed)):
      raise ValueError(
        f"{path} has an {head} that differs from {embed}, yet config.json "
        "sets tie_word_embeddings"
      )
    del shapes[head]
  # Old exports hold the rotary frequencies, which follow from config.json.
  shapes = {k: v for k, v in shapes.items() if not k.endswith(".inv_freq")}
  check_shapes(path, shapes, families.file_shapes(config))


def check_shapes(
  where: str,
  found: Mapping[str, tuple[int, ...]],
  expected: Mapping[str, tuple[int, ...]],
) -> None:
  """Raises a ValueError for what `where` lacks, has besides or in no shape."""
  missing = expected.keys() - found.keys()
  if missing:
    raise ValueError(f"{where} lacks {_some(missing)}")
  extra = found.keys() - expected.keys()
  if extra:
    raise ValueError(f"{where} has {_some(extra)}, unknown to the model")
  for name, shape in expected.items():
    if found[name] != shape:
      raise ValueError(
        f"{where} has {name} in shape {found[name]}, but the model's is {shape}"
      )


def _some(names: Collection[str]) -> str:
  """The first few names, and how many more there are."""
  more = f" and {len(names) - 5} more" if len(names) > 5 else ""
  return ", ".join(sorted(names)[:5]) + more


def read_json(file: pathlib.Path) -> dict[str, Any]:
  """The content of a file of the checkpoint, or a ValueError that names it."""
  if not file.is_file():
    raise ValueError(
      f"there is no {file}: config.model.path must hold a whole checkpoint"
    )
  try:
    content = json.loads(file.read_text(encoding="utf-8"))
  except (ValueError, RecursionError) as error:
    raise ValueError(f"{file} is not JSON ({error}): fetch it again") from None
  if not isinstance(content, dict):
    kind = type(content).__name__
    raise ValueError(
      f"{file} holds a {kind}, not a JSON object: fetch it again"
    )
  return content
