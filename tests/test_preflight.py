"""Options that cannot work are rejected before anything is loaded."""

import shutil
from unittest import mock

import pytest

from dppo_jax import config as configs
from dppo_jax.errors import UserError
from dppo_jax.run import checkpoint
from dppo_jax.run.setup import setup_run
from tests.helpers import commands, sources

SETTINGS = {
  "data__train": "arithmetic:64",
  "sft__steps": 0,
  "data__prompts_per_step": 16,
  "pack__rows_per_micro": 4,
}
ROWS = [{"problem": f"{i}+1=", "answer": str(i + 1)} for i in range(32)]


def arithmetic(method: str = "dppo", **overrides) -> configs.Config:
  """The arithmetic config with few problems."""
  return commands.config(f"arithmetic:{method}", **SETTINGS | overrides)


# Overrides, after a method if it is not dppo; the option and the limit that the
# error names.
REJECTED = [
  ("rollout.group_size=1", "config.rollout.group_size", "at least 2"),
  ("steps=-1", "config.steps", "at least 0"),
  ("rollout.temperature=0", "config.rollout.temperature", "at least 0.01"),
  ("rollout.stop_ids=(24,)", "config.rollout.stop_ids", "24"),
  ("model.dtype=float16", "config.model.dtype", "float32, bfloat16"),
  ("model.remat=some", "config.model.remat", "layers, dots, none"),
  ("model.attention=splash", "config.model.attention", "a TPU"),
  ("rollout.top_k=99", "config.rollout.top_k", "24 tokens"),
  ("reward.overlong_tokens=99", "config.reward.overlong_tokens", "at most"),
  ("model.shape.heads=3", "config.model.shape.heads", "multiple of 2"),
  ("model.path=none", "config.model.path", "there is no directory"),
  ("optimizer.schedule=wild", "config.optimizer.schedule", "constant, linear"),
  ("optimizer.clip_norm=nan", "config.optimizer.clip_norm", "at most"),
  ("reward.functions=fair", "config.reward.functions", "'fair'"),
  ("sft.from_run=none", "config.sft.from_run", "no checkpoint"),
  ("pack.row_length=40", "config.pack.row_length", "40"),
  ("pack.row_length=90", "config.pack.row_length", "multiple of 8"),
  ("data.prompts_per_step=64", "config.data.prompts_per_step", "56 usable"),
  ("data.train=none.jsonl", "config.data.train", "none.jsonl"),
  ("data.max_prompt_tokens=2", "config.data.max_prompt_tokens", "0 used"),
  ("objective.mini_batches=3", "config.objective.mini_batches", "multiple"),
  ("mesh.data=0", "config.mesh.data", "at least 1, or -1"),
  ("mesh.data=3", "config.mesh.data", "multiple of"),
  ("mesh.data=99", "config.mesh.data", "99 devices"),
  ("mesh.model=8", "config.mesh.model", "heads"),
  ("method.args.prompt_rate=1.5", "config.method.args", "1.5"),
  ("objective.args.beta=-1", "config.objective.args", "at least 0"),
  (
    "greso method.args.dynamic_sampling=exact objective.args.beta=0.1",
    "config.objective.args.beta",
    "exact dynamic sampling",
  ),
  (
    "greso method.args.dynamic_sampling=exact data.prompts_per_step=1",
    "config.data.prompts_per_step",
    "at least 2 for exact",
  ),
  (
    "greso,dapo method.args.dynamic_sampling=exact",
    "config.objective.args.tokens_per_completion",
    "exact dynamic sampling",
  ),
]


@pytest.mark.parametrize("overrides, option, limit", REJECTED)
def test_run_is_rejected_with_option_and_limit(overrides, option, limit):
  words = overrides.split()
  method = "dppo" if "=" in words[0] else words.pop(0)
  values = dict(word.split("=") for word in words)
  values = {name.replace(".", "__"): x for name, x in values.items()}
  with pytest.raises(UserError) as error:
    setup_run(arithmetic(method, **values))
  assert option in str(error.value) and limit in str(error.value)
  assert "\n" not in str(error.value)


@pytest.mark.parametrize(
  "name, value, limit",
  [
    ("data.train", None, "text or a function"),
    ("steps", "ten", "a whole number"),
    ("steps", 3.5, "a whole number"),
    ("seed", True, "a whole number"),
    ("optimizer.clip_norm", "x", "a number"),
    ("objective.mask_truncated", 1, "true or false"),
    ("rollout.stop_ids", 3, "a tuple"),
    ("rollout.stop_ids", ("a",), "a whole number"),
    ("rollout.stop_ids", (3, 1.5), "a whole number"),
    ("rollout.stop_ids", (True,), "a whole number"),
    ("rollout.stop_ids", (-1,), "at least 0"),
    ("rollout.stop_strings", ("a", 3), "text"),
    ("rollout.stop_strings", [None], "text"),
    ("method.args", None, "a dict"),
    ("model.shape", {"layers": 1}, "kv_heads"),
  ],
)
def test_a_config_file_may_not_set_another_type(name, value, limit):
  config = configs.Config()
  configs.assign(config, name, value)
  with pytest.raises(UserError, match=rf"config\.{name} .* must .*{limit}"):
    configs.validate(config)


def test_every_number_has_bounds():
  for name, value, _ in configs.walk(configs.Config()):
    if type(value) in (int, float):
      for bad in (1e300 if type(value) is float else 10**22, -(10**22)):
        config = configs.Config()
        configs.assign(config, name, bad)
        with pytest.raises(
          UserError, match=rf"config\.{name} is .*(at|above) "
        ):
          configs.validate(config)


@pytest.mark.parametrize("kind", ["method", "objective"])
def test_unknown_argument_is_rejected_by_name(kind):
  config = arithmetic()
  getattr(config, kind).args["luck"] = 1.0  # as a config file may do
  with pytest.raises(UserError, match=rf"config.{kind}.args.luck"):
    setup_run(config)


def test_only_imitation_needs_solutions(tmp_path, monkeypatch):
  """A run that starts from another's weights needs none."""
  monkeypatch.setattr(checkpoint.Checkpoints, "check_shapes", mock.Mock())
  options = {
    "data__train": sources.write_jsonl(tmp_path / "own.jsonl", ROWS),
    "sft__steps": 3,
  }
  with pytest.raises(UserError, match=r"config.sft.steps is 3"):
    setup_run(arithmetic(**options))
  (tmp_path / "other/checkpoints/0").mkdir(parents=True)
  options["sft__from_run"] = str(tmp_path / "other")
  setup_run(arithmetic(**options))
  shutil.rmtree(tmp_path / "other")
  with pytest.raises(UserError, match=r"from_run: no checkpoint of step 0"):
    setup_run(arithmetic(**options))
  setup_run(arithmetic(**options), begins=False)  # a checkpoint has them


def test_reward_functions_then_data_are_looked_for_before_the_model(tmp_path):
  path = tmp_path / "mine.py"
  path.write_text("def fair(completions): return [1.0 for _ in completions]\n")
  config = arithmetic(
    reward__functions=f"math,{path}:unfair",
    data__train="none.jsonl",
    model__path="none",
  )
  with pytest.raises(UserError, match=r"reward.functions: .*'unfair'"):
    setup_run(config)
  config.reward.functions = f"math,{path}:fair"
  with pytest.raises(UserError, match=r"data\.train: .*none\.jsonl"):
    setup_run(config)
  config.data.train = "arithmetic:64"
  with pytest.raises(UserError, match=r"no directory .*none"):
    setup_run(config)
  config.data.train = ""
  with pytest.raises(UserError, match=r"config\.data\.train is empty"):
    setup_run(config)
