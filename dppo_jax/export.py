"""--mode=export: the weights of a run as a checkpoint for transformers."""

import json
import pathlib
import tempfile

import huggingface_hub
import numpy as np

from dppo_jax import config as configs
from dppo_jax import data
from dppo_jax.config.options import flatten
from dppo_jax.errors import UserError
from dppo_jax.eval import page
from dppo_jax.metrics import progress
from dppo_jax.models import hf, transformer
from dppo_jax.run import compile_cache, setup, trained_weights


def run(
  config: configs.Config,
  workdir: pathlib.Path,
  to: pathlib.Path,
  step: int | None = None,
  dtype: str | None = None,
) -> None:
  """Writes the weights of a checkpoint to the directory `to`.

  The directory appears complete or not at all. It also gets config.json, the
  tokenizer, the generation settings and a model card: those of the checkpoint
  that training began with or, if the model was randomly initialised, new ones.

  Args:
    config: of the run.
    workdir: directory of the run.
    to: directory that does not exist or is empty.
    step: checkpoint step; None for the latest.
    dtype: dtype of the files; None for that of the checkpoint that training
      began with, or float32 without one. The weights of a run are float32.
  Raises:
    UserError: if there are no such weights, or `to` is not empty.
  """
  compile_cache.quiet_libraries()
  to = to.resolve()
  if to.exists() and not (to.is_dir() and not any(to.iterdir())):
    raise UserError(f"--to: {to} is not an empty directory: choose another")
  path, tokenizer, model, *_ = setup.read_inputs(config)
  dtype = dtype or (hf.stored_dtype(path) if path else "float32")
  table = transformer.parameter_table(model)
  like = {name: np.empty(p.shape, np.float32) for name, p in table.items()}
  step, params, warnings = trained_weights.restore(
    workdir, step, transformer.unflatten(like)
  )
  for line in warnings:
    print(progress.wrapped(line), flush=True)
  stop_ids = tuple(config.rollout.stop_ids) or tokenizer.stop_ids
  generation, settings = {"eos_token_id": list(stop_ids)}, {}
  if not path:
    generation["pad_token_id"] = tokenizer.pad_id
    settings = {
      "max_position_embeddings": config.pack.row_length,
      "eos_token_id": stop_ids[0],
      "bos_token_id": None,
    }
  to.parent.mkdir(parents=True, exist_ok=True)
  with tempfile.TemporaryDirectory(prefix=".export-", dir=to.parent) as parent:
    folder = pathlib.Path(parent, to.name)
    hf.save(
      str(folder),
      params,
      model,
      dtype=dtype,
      source=path,
      settings=settings,
      generation=generation,
    )
    if not path:
      tokenizer.save(folder)
    _card(config, workdir, step, tokenizer, to.name).save(folder / "README.md")
    folder.rename(to)
  done = f"wrote the weights of {workdir} after step {step} to {to}, in {dtype}"
  print(progress.wrapped(done), flush=True)


def _card(
  config: configs.Config,
  workdir: pathlib.Path,
  step: int,
  tokenizer: data.Tokenizer,
  name: str,
) -> huggingface_hub.ModelCard:
  """Returns the model card: origin, results, code to load it, all options."""
  model, method = config.model, config.method.name
  metadata = huggingface_hub.ModelCardData(
    library_name="transformers",
    pipeline_tag="text-generation",
    base_model=None if model.path else model.hub_id or None,
    tags=["dppo_jax", "reinforcement-learning", method, config.objective.name],
  )
  # The prompt's text and whether the tokenizer adds special tokens to it.
  prompt, problem, special = "{problem}", "3+9-5=", False
  if isinstance(tokenizer, data.PretrainedTokenizer):
    prompt = tokenizer.prompt("{problem}")
    text = tokenizer.prompt(problem)
    special = tokenizer.encode_prompt(problem) != tokenizer.encode(text)
  results = "No results."
  files = workdir.glob(f"evaluation/step-{step}*/results.json")
  for file in sorted(files, key=lambda x: x.stat().st_mtime):
    evaluation = json.loads(file.read_text(encoding="utf-8"))
    if evaluation["step"] == step:  # step-1* matches step-10 too
      results = page.estimates_table(evaluation["sets"])
  return huggingface_hub.ModelCard(f"""---
{metadata.to_yaml()}
---

# {name}

Trained with dppo_jax for {step} steps by the method `{method}` and the
objective `{config.objective.name}`, from
`{model.path or model.hub_id or "random weights"}`, on `{config.data.train}`.
Nothing but the results below was measured. The licence and the limits of the
model that training began with hold for this one.

## Results

{results}

## Usage

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

path = {name!r}  # this directory
tokenizer = AutoTokenizer.from_pretrained(path)
model = AutoModelForCausalLM.from_pretrained(path)
prompt = {prompt!r}.replace("{{problem}}", {problem!r})  # as in training
inputs = tokenizer(prompt, return_tensors="pt", add_special_tokens={special})
max_tokens = {config.rollout.max_tokens}  # as in training
outputs = model.generate(**inputs, do_sample=False, max_new_tokens=max_tokens)
answer = outputs[0, inputs["input_ids"].shape[1] :]
print(tokenizer.decode(answer, skip_special_tokens=True))
```

## Options of the run

```json
{json.dumps(flatten(config), indent=2)}
```
""")
