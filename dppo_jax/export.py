"""Weights of a run as a checkpoint that transformers and vLLM load."""

from collections.abc import Iterator
import contextlib
import json
import os
import pathlib
import shutil

import numpy as np

from dppo_jax import config as configs
from dppo_jax import data
from dppo_jax.config.options import flatten
from dppo_jax.metrics import model_card, progress
from dppo_jax.models import hf, transformer
from dppo_jax.run import checkpoint, compile_cache, setup

CARD = "README.md"
# Lists the files of an export, so that another may replace them and no other.
MARKER = "dppo_jax.json"
SPARE_BYTES = 64 * 2**20  # for all that is not weights


def run(
  config: configs.Config,
  workdir: pathlib.Path,
  to: pathlib.Path,
  step: int | None = None,
  dtype: str | None = None,
) -> None:
  """Writes the weights of `workdir` after `step` to the directory `to`.

  The directory is written whole or not at all. With the weights go the
  config.json, tokenizer, chat template and generation settings of the
  checkpoint that training began with or, for a model made on the spot, such as
  describe it.

  Args:
    step: None is the newest checkpoint.
    dtype: of the files; None is that of the checkpoint that training began
      with, float32 where there was none. The weights of a run are float32.

  Raises:
    ValueError: for a run without weights of that step or of another model, or
      a directory that holds anything but an earlier export.
    OSError: where the disk is full or does not let us write.
  """
  compile_cache.quiet_libraries()
  path = setup.model_path(config.model)
  to = to.resolve()
  replaced = _check_target(to, path)
  if path:
    hf.check(path)
  dtype = dtype or (hf.stored_dtype(path) if path else "float32")
  tokenizer = setup.make_tokenizer(config, path)
  model = setup.describe_model(config.model, path, tokenizer.vocab_size)
  _check_space(to, transformer.num_parameters(model), dtype)
  step, params = _restore(workdir, step, model)
  stop_ids = tuple(config.rollout.stop_ids) or tokenizer.stop_ids
  with _replacing(to) as folder:
    hf.save(
      str(folder),
      params,
      model,
      dtype=dtype,
      source=path,
      **_settings(config, path, stop_ids, tokenizer),
    )
    if not path:
      tokenizer.save(folder)
    card = model_card.text(
      to.name,
      flatten(config),
      workdir,
      step,
      dtype=dtype,
      num_parameters=transformer.num_parameters(model),
      prompt=_prompt(tokenizer),
      generation=json.loads((folder / hf.GENERATION).read_text()),
    )
    (folder / CARD).write_text(card, encoding="utf-8")
    files = sorted([MARKER, *(x.name for x in folder.iterdir())])
    about = {"workdir": str(workdir), "step": step, "files": files}
    (folder / MARKER).write_text(json.dumps(about, indent=2) + "\n")
  rounded = "" if dtype == "float32" else "; --dtype=float32 rounds nothing"
  done = f"{replaced}wrote the weights of {workdir} after step {step} to {to}"
  print(progress.wrapped(f"{done}, in {dtype}{rounded}"), flush=True)


def _settings(
  config: configs.Config,
  path: str,
  stop_ids: tuple[int, ...],
  tokenizer: data.Tokenizer,
) -> dict[str, dict]:
  """What config.json and generation_config.json say beside the model."""
  generation = {"eos_token_id": list(stop_ids)}
  if path:
    return {"generation": generation}
  settings = {
    "max_position_embeddings": config.pack.row_length,  # the longest trained
    "eos_token_id": stop_ids[0],
    "bos_token_id": None,
  }
  generation["pad_token_id"] = tokenizer.pad_id
  return {"settings": settings, "generation": generation}


def _prompt(tokenizer: data.Tokenizer) -> model_card.Prompt:
  """How a problem becomes a prompt."""
  problem = "1+1="
  if not isinstance(tokenizer, data.PretrainedTokenizer):
    return model_card.Prompt("{problem}", adds_special=False)
  bare = tokenizer.encode(tokenizer.prompt(problem))
  return model_card.Prompt(
    tokenizer.prompt("{problem}"),
    adds_special=tokenizer.encode_prompt(problem) != bare,
  )


def _restore(
  workdir: pathlib.Path, step: int | None, model: transformer.ModelConfig
) -> tuple[int, transformer.Params]:
  """The step that is meant, and its weights on the host."""
  if not (workdir / "checkpoints").is_dir():
    raise ValueError(f"{workdir} holds no run with checkpoints: set --workdir")
  table = transformer.parameter_table(model)
  abstract = transformer.unflatten(
    {name: np.empty(p.shape, np.float32) for name, p in table.items()}
  )
  with checkpoint.Checkpoints(workdir, read_only=True) as checkpoints:
    step = checkpoints.find(step)
    for line in checkpoints.passed_over:
      print(progress.wrapped(line), flush=True)
    try:
      params = checkpoints.restore_params(step, abstract)
      for name, weight in transformer.flatten(params).items():
        if weight.shape != table[name].shape:
          raise ValueError(
            f"{name} has shape {weight.shape}, not {table[name].shape}"
          )
      return step, params
    except (KeyError, TypeError, ValueError) as error:
      raise ValueError(
        f"the weights of {workdir} after step {step} are damaged or of another "
        f"model than the config says ({str(error).partition(chr(10))[0]}): "
        f"--workdir={workdir} without --config takes the config of the run"
      ) from error


def _check_target(to: pathlib.Path, source: str) -> str:
  """Refuses a directory that an export must not replace.

  Returns:
    What there is to say of an earlier export that is replaced.
  """
  if not to.exists():
    return ""
  if not to.is_dir():
    raise ValueError(f"--to: {to} is a file, not a directory")
  if source and to.samefile(source):
    raise ValueError(
      f"--to: {to} holds the checkpoint that training began with"
    )
  found = {x.name for x in to.iterdir()}
  if not found:
    return ""
  try:
    about = json.loads((to / MARKER).read_text())
    strangers = found - set(about["files"])
    before = f"in place of those after step {about['step']}, "
  except (OSError, ValueError, LookupError, TypeError):
    raise ValueError(
      f"--to: {to} is neither empty nor an earlier export: choose another"
    ) from None
  if strangers:
    raise ValueError(
      f"--to: {to} holds {', '.join(sorted(strangers))} beside an earlier "
      "export, which would be lost: choose another, or move what is yours"
    )
  return before


def _check_space(to: pathlib.Path, num_parameters: int, dtype: str) -> None:
  """Refuses a disk that is too full for the weights."""
  needed = num_parameters * np.dtype(dtype).itemsize + SPARE_BYTES
  there = next(folder for folder in to.parents if folder.exists())
  free = shutil.disk_usage(there).free
  if free < needed:
    raise ValueError(
      f"--to: the export takes {needed / 1e9:.1f} GB but {there} has "
      f"{free / 1e9:.1f} GB left: choose another disk, or --dtype=bfloat16"
    )


@contextlib.contextmanager
def _replacing(to: pathlib.Path) -> Iterator[pathlib.Path]:
  """A directory that takes the place of `to` if all goes well."""
  unfinished = to.with_name(f".{to.name}.unfinished")
  replaced = to.with_name(f".{to.name}.replaced")
  shutil.rmtree(unfinished, ignore_errors=True)
  unfinished.mkdir(parents=True)
  try:
    yield unfinished
    if to.exists():
      shutil.rmtree(replaced, ignore_errors=True)
      os.rename(to, replaced)
    try:
      os.rename(unfinished, to)
    except OSError:
      if replaced.exists():
        os.rename(replaced, to)
      raise
  finally:
    shutil.rmtree(unfinished, ignore_errors=True)
  shutil.rmtree(replaced, ignore_errors=True)
