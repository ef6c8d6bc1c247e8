"""What the READMEs tell a reader to type is understood and works."""

import pathlib
import re
import shlex

import commands
import pytest

from dppo_jax import config as configs
from dppo_jax import methods, rewards
from dppo_jax.setup_run import setup_run

README = commands.ROOT / "README.md"
PAGES = [README, *sorted(commands.ROOT.glob("experiments/**/README.md"))]
# A fenced block, perhaps within a list, and what language it is in.
BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)


def _blocks(path: pathlib.Path, *languages: str) -> list[str]:
  found = BLOCK.findall(path.read_text())
  return [text for _, language, text in found if language in languages]


def _commands() -> list[list[str]]:
  """Every call of the main program, as words."""
  found = []
  for path in PAGES:
    for block in _blocks(path, "sh", "bash"):
      for line in block.replace("\\\n", " ").splitlines():
        for part in line.split("&&"):
          words = shlex.split(part)
          if "dppo_jax.main" in words:
            found.append(words[words.index("dppo_jax.main") + 1 :])
  return found


@pytest.mark.parametrize("words", _commands(), ids=" ".join)
def test_every_command_of_a_readme_makes_a_config(words, monkeypatch):
  monkeypatch.chdir(commands.ROOT)
  path = next(w for w in words if w.startswith("--config="))
  others = [w for w in words if w.startswith("--config.")]
  configs.validate(commands.parse([path, *others]))


def test_every_option_that_the_readme_names_exists():
  """`--config.a.b` anywhere in the text, of one of the methods."""
  named = set(re.findall(r"--config\.([\w.]+\w)", README.read_text()))
  assert len(named) > 12
  known = set()
  for method in methods.METHODS:
    for objective in ("dapo", "gspo"):
      c = commands.config(f"arithmetic:{method},{objective}")
      for section in ("method", "objective"):
        args = getattr(c, section).args
        known |= {f"{section}.args.{name}" for name in args}
  known |= {name for name, _, _ in configs.walk(configs.Config())}
  assert not named - known


def test_the_readmes_method_trains_under_its_name(tmp_path, monkeypatch):
  monkeypatch.setattr(methods, "METHODS", dict(methods.METHODS))
  block = next(x for x in _blocks(README, "python") if "def coin" in x)
  (tmp_path / "coin.py").write_text(block)
  c = commands.parse(
    [
      f"--config={tmp_path}/coin.py:coin,gspo",
      "--config.method.args.share=0.25",
      "--config.data.num_arithmetic=64",
    ]
  )
  assert c.method.name == "coin" and c.objective.name == "gspo"
  assert setup_run(c).method.completions is not None


def test_the_readmes_reward_is_one(tmp_path):
  block = next(x for x in _blocks(README, "python") if "def brevity" in x)
  (tmp_path / "my_rewards.py").write_text(block)
  functions = f"exact,{tmp_path}/my_rewards.py:brevity:0.5"
  with rewards.Grader(functions, num_workers=1) as grader:
    grader.self_check()
    graded = grader.grade(["1+1="], [r"\boxed{2}"], ["2"])
  assert 1.49 < graded.rewards[0] < 1.5 and graded.correct[0] == 1


def test_files_that_the_readmes_link_to_exist():
  for path in PAGES:
    for target in re.findall(r"\]\(([^)#]+)\)", path.read_text()):
      if not target.startswith("http"):
        assert (path.parent / target).exists(), f"{path}: {target}"
