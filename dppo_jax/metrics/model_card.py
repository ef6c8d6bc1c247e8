"""A model card: what was trained, how, with what result, how to load it."""

from collections.abc import Mapping
import json
import pathlib
import re
from typing import Any, NamedTuple

from dppo_jax.analysis import runs
from dppo_jax.metrics import jsonl, tables

Config = Mapping[str, Any]  # every option's value by its dotted name

# Of generation_config.json: what changes the tokens, some even greedy ones.
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


class Prompt(NamedTuple):
  """How a problem becomes a prompt.

  Attributes:
    template: the prompt's text, with {problem} where the problem stands.
    adds_special: whether the tokenizer adds its special tokens to that.
  """

  template: str
  adds_special: bool


def text(
  name: str,
  config: Config,
  workdir: pathlib.Path,
  step: int,
  *,
  dtype: str,
  num_parameters: int,
  prompt: Prompt,
  generation: Mapping[str, Any],
) -> str:
  """The card of the weights of the run in `workdir` after `step`, as Markdown.

  Args:
    name: of the directory that holds them.
    config: of the run.
    dtype: of the files.
    generation: what generation_config.json says.
  """
  model = config["model.path"] or config["model.hub_id"]
  began = f"`{model}`" if model else "random weights"
  shown = json.dumps(dict(config), indent=2)
  parts = [
    _front_matter(config),
    f"# {name}",
    f"A language model of {num_parameters:,} parameters. From {began}, "
    f"dppo_jax trained it for {step} steps of reinforcement learning with "
    f"verifiable rewards, by the method `{runs.call(config, 'method')}` and "
    f"the objective `{runs.call(config, 'objective')}`. Training held float32 "
    f"weights; these are {dtype}.",
    "## Results",
    _results(config, workdir, step),
    "## How to load it",
    _loading(name, config, prompt, generation),
    "## How it was trained",
    _training(config, workdir, step),
    "## Limits",
    _limits(config, bool(model)),
    "<details><summary>Every option of the run</summary>",
    f"```json\n{shown}\n```",
    "</details>",
  ]
  return "\n\n".join(parts) + "\n"


def _front_matter(config: Config) -> str:
  lines = ["library_name: transformers", "pipeline_tag: text-generation"]
  if config["model.hub_id"] and not config["model.path"]:
    lines += [
      f"base_model: {json.dumps(config['model.hub_id'])}",
      "base_model_relation: finetune",
    ]
  tags = ["dppo_jax", "reinforcement-learning"]
  tags += [config["method.name"], config["objective.name"]]
  lines += ["tags:", *(f"- {json.dumps(tag)}" for tag in dict.fromkeys(tags))]
  return "\n".join(["---", *lines, "---"])


def _results(config: Config, workdir: pathlib.Path, step: int) -> str:
  file = workdir / "evaluation" / f"step-{step}" / "results.md"
  parts = []
  if file.is_file():
    page = file.read_text(encoding="utf-8").strip()
    # Headings below ours; pictures and files that it links to stay behind.
    page = re.sub(r"^#", "###", page, flags=re.MULTILINE)
    page = re.sub(r"!\[[^]]*\]\([^)]*\)\n*", "", page)
    parts.append(re.sub(r"\[([^]]*)\]\((?!https?:)[^)]*\)", r"\1", page))
  evals = [
    line
    for line in jsonl.read(workdir / "metrics.jsonl")
    if "eval/accuracy" in line and line["step"] <= step
  ]
  if evals:
    samples = config["eval.samples"]
    how = f"{samples} samples of each problem" if samples else "greedy"
    found = [re.fullmatch("(eval.*)/accuracy", x) for x in evals[-1]]
    sets = [match[1] for match in found if match]
    ends = {line["step"]: line for line in (evals[0], evals[-1])}
    rows = [
      (at, *(_accuracy(line, x) for x in sets)) for at, line in ends.items()
    ]
    heads = [x.removeprefix("eval/").replace("eval", "accuracy") for x in sets]
    parts.append(
      f"Accuracy on `{config['data.eval']}`, {how}, with its standard error "
      f"over problems:\n\n{tables.markdown(('step', *heads), rows)}"
    )
  return "\n\n".join(parts) or "Nothing was evaluated."


def _loading(
  name: str, config: Config, prompt: Prompt, generation: Mapping[str, Any]
) -> str:
  is_arithmetic = config["data.train"].startswith("arithmetic")
  problem = "3+9-5=" if is_arithmetic else "What is 17 times 24?"
  special = "" if prompt.adds_special else ", add_special_tokens=False"
  kept = [f"`{x}={generation[x]}`" for x in SAMPLING if x in generation]
  warning = ""
  if kept:
    warning = (
      f"\n\nUnless told otherwise, both sample with {', '.join(kept)}: "
      "generation_config.json keeps what it said before. Training sampled at "
      f"temperature {config['rollout.temperature']}, without penalty."
    )
  return f"""```python
from transformers import AutoModelForCausalLM, AutoTokenizer

path = {name!r}  # this directory
tokenizer = AutoTokenizer.from_pretrained(path)
model = AutoModelForCausalLM.from_pretrained(path)

PROMPT = {prompt.template!r}  # as in training
prompt = PROMPT.replace("{{problem}}", {problem!r})
inputs = tokenizer(prompt, return_tensors="pt"{special})
max_tokens = {config["rollout.max_tokens"]}  # as in training
outputs = model.generate(**inputs, do_sample=False, max_new_tokens=max_tokens)
answer = outputs[0, inputs["input_ids"].shape[1] :]
print(tokenizer.decode(answer, skip_special_tokens=True))
```

`vllm serve {name}` serves it; prompts are to read as above. dppo_jax goes on
from it with `--config.model.path={name}`.{warning}"""


def _training(config: Config, workdir: pathlib.Path, step: int) -> str:
  lines = [
    line
    for line in jsonl.read(workdir / "metrics.jsonl")
    if "tokens/generated" in line and line["step"] <= step
  ]
  total = lambda name: f"{sum(line.get(name, 0) for line in lines):,.0f}"
  c = config
  rows = [
    ("problems", f"`{c['data.train']}`"),
    ("reward", f"`{c['reward.functions']}`"),
    ("steps", f"{step} of {c['steps']}, seed {c['seed']}"),
    (
      "a step",
      f"{c['data.prompts_per_step']} prompts x {c['rollout.group_size']} "
      f"completions of at most {c['rollout.max_tokens']} tokens, before any is "
      f"pruned; {c['objective.inner_updates']} pass(es) over them, each of "
      f"{c['objective.mini_batches']} update(s)",
    ),
    ("sampling", f"temperature {c['rollout.temperature']}"),
    (
      "optimizer",
      f"AdamW, learning rate {c['optimizer.learning_rate']}, "
      f"{c['optimizer.schedule']}, {c['optimizer.warmup_steps']} warm-up steps",
    ),
    ("computation", c["model.dtype"]),
    ("tokens generated", total("tokens/generated")),
    ("tokens trained", total("tokens/trained")),
  ]
  if c["sft.from_run"]:
    rows.insert(2, ("first weights", f"those of `{c['sft.from_run']}`"))
  elif c["sft.steps"]:
    supervised = f"{c['sft.steps']} steps before the first rollout"
    rows.insert(2, ("supervised fine-tuning", supervised))
  return tables.markdown(("", ""), rows)


def _limits(config: Config, has_base: bool) -> str:
  lines = [
    f"Trained for one kind of problem, `{config['data.train']}`, by a reward "
    "that reads the final answer: a right answer may follow from wrong work.",
    "Other abilities, languages and safety were not measured, and training "
    "may have changed them.",
    f"Completions were cut at {config['rollout.max_tokens']} tokens and "
    f"sequences at {config['pack.row_length']}; longer ones are untried.",
  ]
  if has_base:
    lines.append(
      "What holds of the model that training began with, its licence and its "
      "limits, holds of this one."
    )
  else:
    lines.append("It knows nothing but this task.")
  return "\n".join(f"- {line}" for line in lines)


def _accuracy(line: Mapping[str, float], name: str) -> str:
  accuracy, stderr = (line.get(f"{name}/{x}") for x in ("accuracy", "stderr"))
  return "" if accuracy is None else f"{accuracy:.3f} ± {stderr or 0:.3f}"
