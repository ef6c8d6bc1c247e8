"""Writing Hugging Face checkpoints, for transformers, vLLM and ourselves."""

from collections.abc import Mapping
import json
import os
import pathlib
import shutil
from typing import Any

import huggingface_hub
import numpy as np
import safetensors
import safetensors.numpy

from dppo_jax.errors import UserError
from dppo_jax.files import json_object
from dppo_jax.models import parameters
from dppo_jax.models.config import ModelConfig
from dppo_jax.models.hf import families, reader
from dppo_jax.models.parameters import Params

DTYPES = tuple(reader.FLOATS.values())
SHARD_BYTES = 5 * 10**9  # size of the largest file, as in the hub's tools


def save(
  path: str | pathlib.Path,
  params: Params,
  config: ModelConfig,
  *,
  dtype: str = "float32",
  source: str | pathlib.Path = "",
  settings: Mapping[str, Any] | None = None,
  generation: Mapping[str, Any] | None = None,
  shard_bytes: int = SHARD_BYTES,
) -> None:
  """Writes a checkpoint that `load`, transformers and vLLM read.

  Weights in the directory are replaced. The host holds one file at a time, in
  addition to `params`.

  Args:
    params: weights, all addressable by this process.
    dtype: dtype of the files: float32, bfloat16 or float16.
    source: another directory, of the initial checkpoint, whose config.json,
      tokenizer, licence and generation settings are copied; "" for none.
    settings: further keys of config.json.
    generation: further keys of generation_config.json.
    shard_bytes: size of the largest file; a larger tensor has its own file.
  """
  if dtype not in DTYPES:
    raise UserError(f"dtype is {dtype!r}: a file is {' or '.join(DTYPES)}")
  out = pathlib.Path(path)
  out.mkdir(parents=True, exist_ok=True)
  for pattern in reader.COMPANIONS if source else ():
    for file in filter(os.path.isfile, pathlib.Path(source).glob(pattern)):
      shutil.copyfile(file, out / file.name)
  described = _settings(config, source) | {"torch_dtype": dtype}
  write_json(out / "config.json", described | dict(settings or {}))
  if generation:
    file = out / reader.GENERATION
    known = json_object.read(file) if file.is_file() else {}
    write_json(file, known | dict(generation))
  flat = {k: np.asarray(x) for k, x in parameters.flatten(params).items()}
  write_weights(out, flat, dtype, shard_bytes)


def _settings(
  config: ModelConfig, source: str | pathlib.Path
) -> dict[str, Any]:
  """Returns the content of config.json without the dtype."""
  settings = families.to_settings(config)
  if source:
    copied = json_object.read(pathlib.Path(source, "config.json"))
    text = families.text_settings(copied)
    if text is not copied:  # its settings may be incomplete
      copied = {**settings, **text}
    if "rope_theta" not in copied:  # transformers 4 looks nowhere else
      keys = ("rope_theta", "rope_scaling", "rope_local_base_freq")
      known = {k: x for k, x in settings.items() if x is not None}
      copied |= {k: known[k] for k in keys if k in known}
    settings = copied
  settings.pop("dtype", None)  # transformers 5; 4 and 5 read torch_dtype
  return settings


def write_weights(
  out: pathlib.Path,
  flat: Mapping[str, np.ndarray],
  dtype: str,
  shard_bytes: int = SHARD_BYTES,
  stem: str = "model",
) -> None:
  """Writes one file, or several with an index, named as in transformers."""
  for stale in out.glob(f"{stem}*.safetensors*"):
    stale.unlink()
  pieces = {
    tensor: (name, index)
    for name, weight in flat.items()
    for index, tensor in families.tensors(name, weight.shape)
  }
  itemsize = np.dtype(dtype).itemsize
  split = huggingface_hub.split_state_dict_into_shards_factory(
    pieces,
    get_storage_size=lambda piece: flat[piece[0]][piece[1]].size * itemsize,
    filename_pattern=f"{stem}{{suffix}}.safetensors",
    max_shard_size=shard_bytes,
  )
  for name, names in split.filename_to_tensors.items():
    tensors = {}
    for tensor in names:
      weight, index = pieces[tensor]
      piece = families.to_file(weight, flat[weight][index])
      tensors[tensor] = _stored(piece, tensor, dtype)
    try:
      safetensors.numpy.save_file(tensors, out / name, {"format": "pt"})
    except safetensors.SafetensorError as error:  # from the operating system
      raise UserError(f"cannot write {out / name}: {error}") from None
    # safetensors ignores the umask and makes its file private.
    (out / name).chmod(next(out.glob("*config.json")).stat().st_mode)
  if split.is_sharded:
    files = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
    write_json(out / reader.INDEX, files)


def _stored(piece: np.ndarray, tensor: str, dtype: str) -> np.ndarray:
  """Returns one tensor in the dtype of the file."""
  with np.errstate(over="ignore"):
    stored = np.ascontiguousarray(piece, dtype)
  if not np.isfinite(stored).all():
    raise UserError(
      f"{tensor} is not finite in {dtype}: choose another dtype, or the "
      "weights of an earlier step"
    )
  return stored


def write_json(file: pathlib.Path, content: Mapping[str, Any]) -> None:
  """Writes an object, with its keys in order."""
  text = json.dumps(content, indent=2, sort_keys=True) + "\n"
  file.write_text(text, encoding="utf-8")
