"""Adapters in the format of PEFT: adapter_config.json and safetensors."""

import pathlib
from typing import Any

import jax
from jaxtyping import PyTree
import numpy as np

from dppo_jax.errors import UserError
from dppo_jax.files import json_object
from dppo_jax.models import lora, parameters
from dppo_jax.models.config import ModelConfig
from dppo_jax.models.hf import reader, saver
from dppo_jax.models.parameters import Params

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"

_KINDS = {
  "r": int | None,
  "lora_alpha": float | None,
  "target_modules": str | list[str] | None,
}

# Settings of PEFT that change the function of an adapter or its base, with
# their supported values.
_SUPPORTED = {
  "peft_type": ("LORA",),
  "bias": ("none",),
  "use_rslora": (False,),
  "use_dora": (False,),
  "fan_in_fan_out": (False,),
  "modules_to_save": (None, []),
  "layers_to_transform": (None,),
  "rank_pattern": ({},),
  "alpha_pattern": ({},),
  "alora_invocation_tokens": (None,),
  "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva"),
}


def load(
  path: str | pathlib.Path, config: ModelConfig, shardings: PyTree
) -> Params:
  """Returns float32 adapters, `{"adapters": ...}`, placed by `shardings`."""
  tensors = reader.open_tensors(path, WEIGHTS)
  table = parameters.trainable_table(config)
  return reader.read_table(path, tensors, table, shardings, "float32")


def check(path: str | pathlib.Path, config: ModelConfig) -> None:
  """Raises UserError unless `path` has the adapters that `config` describes."""
  label, adapters = f"config.lora.adapter {path}", config.lora
  for name in (CONFIG, WEIGHTS):
    if not pathlib.Path(path, name).is_file():
      raise UserError(
        f"{label} has no {name}: name the directory of an adapter"
      )
  settings = json_object.read(pathlib.Path(path, CONFIG), _KINDS)
  for key, values in _SUPPORTED.items():
    if key in settings and settings[key] not in values:
      raise UserError(
        f"{label} has {key}={settings[key]!r}, which is not supported (use "
        f"{values[0]!r})"
      )
  if not adapters:
    raise UserError(
      f"{label} has rank {settings.get('r')} but config.lora.rank is 0: set it "
      "to the same"
    )
  stored = settings.get("target_modules")
  if isinstance(stored, list):  # else its tensors decide
    layers = {x.rpartition(".")[2] for x in stored}
    if layers != {f"{x}_proj" for x in adapters.targets}:
      raise UserError(
        f"{label} adapts {','.join(sorted(layers))}: set config.lora.targets "
        "to these layers"
      )
  for key, option in (("r", "rank"), ("lora_alpha", "alpha")):
    if settings.get(key) != (value := getattr(adapters, option)):
      raise UserError(
        f"{label} has {key}={settings.get(key)} but config.lora.{option} is "
        f"{value}: set it to the same"
      )
  tensors = reader.open_tensors(path, WEIGHTS)
  table = parameters.trainable_table(config)
  reader.compare_shapes(f"{label}, of another model", tensors, table)


def save(
  path: str | pathlib.Path,
  params: Params,
  config: ModelConfig,
  base: str,
  revision: str,
  dtype: str,
) -> None:
  """Writes the adapters of weights, for `peft.PeftModel.from_pretrained`.

  Args:
    base: id or directory of the checkpoint that the adapters belong to; empty
      if there is none.
    revision: of an id; empty for the latest.
    dtype: dtype of the file: float32, bfloat16 or float16.
  """
  if config.lora is None:
    raise ValueError("the model has no adapters: its config.lora is None")
  out = pathlib.Path(path)
  out.mkdir(parents=True, exist_ok=True)
  settings = _settings(config.lora, base, revision)
  saver.write_json(out / CONFIG, settings)
  flat = parameters.flatten(jax.tree.map(np.asarray, lora.trainable(params)))
  saver.write_weights(out, flat, dtype, stem="adapter_model")


def _settings(adapters: lora.Lora, base: str, revision: str) -> dict[str, Any]:
  return {
    "base_model_name_or_path": base or None,
    "bias": "none",
    "fan_in_fan_out": False,
    "inference_mode": True,
    "lora_alpha": adapters.alpha,
    "lora_dropout": 0.0,
    "modules_to_save": None,
    "peft_type": "LORA",
    "r": adapters.rank,
    "revision": revision or None,
    "target_modules": [f"{name}_proj" for name in adapters.targets],
    "task_type": "CAUSAL_LM",
    "use_dora": False,
    "use_rslora": False,
  }
