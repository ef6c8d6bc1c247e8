"""--mode=export: the weights of a run as a checkpoint for transformers."""

from collections.abc import Callable
import contextlib
import functools
import json
import pathlib
import string
import tempfile
from typing import Any

import huggingface_hub
import jax
import numpy as np

from dppo_jax import config as configs
from dppo_jax import data
from dppo_jax.analysis import runs, statistics
from dppo_jax.data.problems import make_prompt
from dppo_jax.errors import UserError, first_line
from dppo_jax.eval import page
from dppo_jax.files import bucket, json_object, user_code
from dppo_jax.metrics import progress
from dppo_jax.models import hf, lora, parameters
from dppo_jax.models.config import ModelConfig
from dppo_jax.models.hf import peft
from dppo_jax.run import checkpoint, checkpoint_steps, setup


def run(
  config: configs.Config,
  workdir: pathlib.Path,
  to: str | pathlib.Path,
  step: int | str | None = None,
  dtype: str | None = None,
  format: str = "model",
  push: str = "",
) -> None:
  """Writes a checkpoint to a directory, which appears once it is complete.

  Adapters are merged with the frozen weights or, with the model card, written
  alone.

  The directory of a model also gets config.json, the tokenizer, the generation
  settings and a model card. All but the card are copies of the files that
  training began with, with the chat template of the config; if the model was
  randomly initialised, they are new.

  Args:
    config, workdir: of the run.
    to: directory or URL that does not exist or is empty.
    step: checkpoint step, or "best"; None for the latest.
    dtype: dtype of the files; None for the dtype of the checkpoint that
      training began with, or float32 for adapters or without a checkpoint.
    format: "model", or "adapter" to write only the adapters, for PEFT.
    push: OWNER/NAME of a repository of the Hugging Face hub to upload to.
  Raises:
    UserError: if there are no such weights, `to` is not empty, or the hub
      rejects the repository.
  """
  config, workdir = configs.absolute_paths(config), workdir.absolute()
  to = pathlib.Path(bucket.output(str(to))).resolve()
  is_adapter = format == "adapter"
  checkpoints = bucket.place((workdir / "checkpoints").resolve())
  if bucket.place(to).is_relative_to(checkpoints):
    raise UserError(f"--to: {to} is among the checkpoints: choose another")
  _check_empty(to)
  step = checkpoint_steps.find(workdir, step, best=config.checkpoint.best)
  path, tokenizer, model = setup.read_model(config)
  model = setup.with_lora(model, config.lora)
  if is_adapter:
    _check_adapter(model, path)
  if push:
    _create_repository(push)
  is_float32 = is_adapter or not path
  dtype = dtype or ("float32" if is_float32 else hf.stored_dtype(path))
  is_tuned = bool(config.sft.steps or config.sft.from_run)
  params = _read_weights(workdir, step, model, is_adapter)
  is_new = not to.exists()  # else perhaps the place of another file system
  place = to.parent if is_new else to
  place.mkdir(parents=True, exist_ok=True)
  with tempfile.TemporaryDirectory(prefix=".export-", dir=place) as parent:
    folder = pathlib.Path(parent, to.name)
    if is_adapter:
      name, _, revision = config.model.hub_id.partition("@")
      base = (path, "") if config.model.path else (name, revision)
      base = ("", "") if is_tuned else base
      peft.save(str(folder), params, model, *base, dtype)
    else:
      with jax.default_device(jax.local_devices(backend="cpu")[0]):
        params = lora.merge_all(params, model.lora)
      keys = _json_keys(config, tokenizer, path)
      hf.save(str(folder), params, model, dtype=dtype, source=path, **keys)
      tokenizer.save(folder)
    card = _card(config, workdir, step, tokenizer, to.name, is_adapter)
    (folder / "README.md").write_text(card, encoding="utf-8")
    for file in [folder] if is_new else [*folder.iterdir()]:
      file.rename(place / file.name)
  bucket.send(to)
  written = "adapters" if is_adapter else "weights"
  done = (
    f"wrote the {written} of {bucket.shown(workdir)} after step {step} to "
    f"{bucket.shown(to)}, in {dtype}"
  )
  if is_adapter and is_tuned:
    done += "; --step=0 exports the fine-tuned weights that they adapt"
  print(progress.wrapped(done), flush=True)
  if push:
    print(f"uploaded to {_upload(push, to)}", flush=True)


def _json_keys(
  config: configs.Config, tokenizer: data.Tokenizer, path: str
) -> dict[str, Any]:
  """Returns further keys of the files with generation settings and sizes."""
  stop_ids = tuple(config.rollout.stop_ids) or tokenizer.stop_ids
  keys: dict[str, dict] = {"generation": {"eos_token_id": list(stop_ids)}}
  if not path:
    keys["generation"]["pad_token_id"] = tokenizer.pad_id
    keys["settings"] = {
      "max_position_embeddings": config.pack.row_length,
      "eos_token_id": stop_ids[0],
      "bos_token_id": None,
    }
  return keys


def _read_weights(
  workdir: pathlib.Path, step: int, model: ModelConfig, is_adapter: bool
) -> parameters.Params:
  """Returns the weights of a checkpoint, or the adapters alone, on the host."""
  init = functools.partial(parameters.init, model)
  like = jax.eval_shape(init, jax.random.key(0))
  like = lora.trainable(like) if is_adapter else like
  like = jax.tree.map(lambda x: np.empty(x.shape, x.dtype), like)
  with checkpoint.Checkpoints(workdir, read_only=True) as checkpoints:
    return checkpoints.restore_params(step, like)


def _create_repository(name: str) -> None:
  """Creates a private repository, unless it exists."""
  if not huggingface_hub.get_token():
    raise UserError(
      "--push needs a token of the Hugging Face hub with write access: run "
      "`hf auth login`, or set HF_TOKEN"
    )
  try:
    huggingface_hub.HfApi().create_repo(name, private=True, exist_ok=True)
  except Exception as error:  # the library's, its transport's or the system's
    reason = first_line(error)
    raise UserError(f"--push: cannot create {name} ({reason})") from error


def _upload(name: str, folder: pathlib.Path) -> str:
  """Uploads the files of a folder in one commit, and returns its address."""
  try:
    return huggingface_hub.HfApi().upload_folder(
      repo_id=name, folder_path=folder, commit_message="Export of dppo_jax"
    )
  except Exception as error:  # the library's, its transport's or the system's
    raise UserError(
      f"--push: cannot upload to {name} ({first_line(error)}): run "
      f"`hf upload {name} {folder}` to try again"
    ) from error


def _check_adapter(model: ModelConfig, path: str) -> None:
  """Raises UserError unless PEFT can load the adapters of this model."""
  if not model.lora:
    raise UserError(
      "--format=adapter needs a run with adapters, but config.lora.rank is 0"
    )
  if path and hf.has_images(path):
    raise UserError(
      f"--format=adapter: {path} has images too, where PEFT would not find the "
      "layers that were trained: export the merged model"
    )


def _prompt(template: str | Callable, tokenizer: data.Tokenizer) -> str:
  """Returns a prompt with the names of columns in the place of their values."""
  if not isinstance(template, str):
    template = user_code.reference_of(template)
  if template and "{" not in template:
    return f"(made of each row by {template})"
  fields = (name for _, name, *_ in string.Formatter().parse(template))
  columns = {name: f"{{{name}}}" for name in ("problem", *filter(None, fields))}
  with contextlib.suppress(UserError):
    return tokenizer.prompt(make_prompt(template, "{problem}", columns))
  with contextlib.suppress(UserError):  # for {choices[0]}, a part of a column
    return tokenizer.prompt(template)
  return "(made of each row by the chat template)"


def _check_empty(to: pathlib.Path) -> None:
  if to.exists() and not to.is_dir():
    raise UserError(f"--to: {to} is a file: name a directory")
  if to.exists() and (path := next(to.iterdir(), None)):
    raise UserError(
      f"--to: {to} is not empty, it has {path.name}: choose another"
    )


def _of_run(workdir: pathlib.Path, step: int) -> str:
  """Returns the accuracies that a run logged at a step, as lines."""
  with contextlib.suppress(UserError):  # a damaged log stops no export
    evals = runs.load(str(bucket.place(workdir))).evals
    lines = [x for x in evals if x["step"] == step and "eval/problems" in x]
    return "\n".join(
      f"- {decoding} accuracy on {line['eval/problems']:.0f} problems: "
      f"{statistics.with_interval(accuracy)}"
      for line in lines[-1:]
      for decoding, accuracy in runs.accuracies(line).items()
    )
  return ""


def _card(
  config: configs.Config,
  workdir: pathlib.Path,
  step: int,
  tokenizer: data.Tokenizer,
  name: str,
  is_adapter: bool,
) -> str:
  """Returns the model card: origin, prompt, results and all options."""
  model, method, objective = config.model, config.method, config.objective
  tags = ["dppo_jax", "reinforcement-learning", method.name, objective.name]
  has_base = model.hub_id and not model.path
  base = f"\nbase_model: {model.hub_name}" if has_base else ""
  results = _of_run(workdir, step) or "No results."
  folder = bucket.local(str(bucket.place(workdir) / "evaluation"))
  files = pathlib.Path(folder).glob(f"step-{step}*/results.json")
  for file in sorted(files, key=lambda x: (len(str(x)), x)):
    kinds = {"step": int, "sets": dict}
    hint = "delete it, or evaluate the step again"
    evaluation = json_object.read(file, kinds, hint)
    if evaluation["step"] == step:  # step-1* matches step-10 too
      results = page.table(evaluation["sets"])
  return f"""---
library_name: {"peft" if is_adapter else "transformers"}
pipeline_tag: text-generation
tags: {json.dumps(tags)}{base}
---

# {name}

Trained with dppo_jax for {step} steps by the method `{method.name}` and the
objective `{objective.name}`, from
`{model.path or model.hub_id or "random weights"}`, on `{config.data.train}`.
The licence and the limits of the model that training began with hold for this
one. Nothing but the results below is known of it. Prompts in training were

```
{_prompt(config.data.template, tokenizer)}
```

## Results

{results}

## Options of the run

```json
{json.dumps(configs.flatten(config), indent=2)}
```
"""
