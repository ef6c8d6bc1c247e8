"""Commands, code, options and links of the READMEs work."""

import importlib.util
import pathlib
import re
import runpy
import time
import types
from unittest import mock

import numpy as np
import pytest

from dppo_jax import config as configs
from dppo_jax import methods
from dppo_jax.algo import objectives
from dppo_jax.errors import StopTraining
from tests.helpers import api_page, commands, pages

PAGES = pages.pages()
COMMANDS = [
  (page, words) for page in PAGES for words in pages.shell_commands(page)
]
MAIN = [(page, words) for page, words in COMMANDS if "dppo_jax.main" in words]
BLOCKS = [
  (page, text) for page in PAGES for text in pages.blocks(page, "python")
]


def _name(x) -> str:
  """Returns a page's path, a command, or the first line of a block."""
  if isinstance(x, pathlib.Path):
    return str(x.relative_to(commands.ROOT))
  return " ".join(x) if isinstance(x, list) else x.partition("\n")[0]


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
  """Changes to an empty directory; restores METHODS and OBJECTIVES later."""
  monkeypatch.chdir(tmp_path)
  for module, name in ((methods, "METHODS"), (objectives, "OBJECTIVES")):
    monkeypatch.setattr(module, name, dict(getattr(module, name)))
  return tmp_path


def _clone(folder: pathlib.Path, page: pathlib.Path) -> None:
  """Fills a folder with the repository and the files of a page."""
  for name in ("configs", "dppo_jax", "experiments"):
    (folder / name).symlink_to(commands.ROOT / name)
  for name, text in pages.files(page).items():
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)


@pytest.mark.parametrize("page, words", MAIN, ids=_name)
def test_every_command_of_a_readme_is_valid(page, words, elsewhere):
  _clone(elsewhere, page)
  words = words[words.index("dppo_jax.main") + 1 :]
  if "--help" in words:
    return
  if not any(re.match(r"--config=\S+\.py", w) for w in words):
    # The config of a run, replaced by that of the default task.
    place = r"--(config|workdir|config\.model\.path)="
    assert any(re.match(place, w) for w in words)
    words = [w for w in words if not w.startswith("--config=")]
    words.insert(0, "--config=configs/arithmetic.py")
  configs.validate(commands.parse(words))


def test_programs_and_modules_of_the_commands_exist():
  for page, words in COMMANDS:
    after = words[words.index("python") + 1 :] if "python" in words else []
    if after[:1] == ["-m"] and after[1].startswith(("dppo_jax", "experiments")):
      assert importlib.util.find_spec(after[1]), (page, after[1])
    elif after and after[0].endswith(".py"):
      known = (commands.ROOT / after[0]).exists()
      assert known or after[0] in pages.files(page), (page, after[0])


@pytest.mark.parametrize("page, text", BLOCKS, ids=_name)
def test_every_block_of_python_runs_by_itself(page, text, elsewhere):
  (elsewhere / "block.py").write_text(text)
  path = str(elsewhere / "block.py")
  with np.printoptions():  # restores those that the code sets
    variables = runpy.run_path(path, run_name="__main__")
  if "history" in variables:  # mean rewards of a training loop
    first, *_, last = variables["history"]
    assert last > first + 0.5


def test_callbacks_of_the_configs_page_end_a_run_in_time():
  blocks = pages.blocks(commands.ROOT / "configs/README.md", "python")
  (text,) = (x for x in blocks if "StopTraining" in x)
  variables = {}
  exec(text, variables)
  early, late = variables["good_enough"], variables["an_hour"]
  for evaluation in ({}, {"eval/accuracy": 0.9}):
    early(1, types.SimpleNamespace(evaluation=evaluation), None)
  with pytest.raises(StopTraining):
    early(1, types.SimpleNamespace(evaluation={"eval/accuracy": 0.91}), None)
  clock = mock.Mock(return_value=variables["START"] + 3599)
  with mock.patch.object(time, "monotonic", clock):
    late(1, None, None)
    clock.return_value += 2
    with pytest.raises(StopTraining):
      late(1, None, None)


def test_every_option_that_a_readme_names_exists():
  known = {name for name, _, _ in configs.walk(configs.Config())}
  known |= {name.partition(".")[0] for name in known}  # sections
  known |= {f"model.shape.{name}" for name in configs.Config().model.shape}
  for section, factories in (
    ("method", methods.METHODS),
    ("objective", objectives.OBJECTIVES),
  ):
    for factory in factories.values():
      args = configs.default_args(factory)
      known |= {f"{section}.args.{name}" for name in args}
  named = set()
  for page in PAGES:
    here = set(re.findall(r"--config\.([a-z][\w.]+\w)", pages.prose(page)))
    named |= {x for x in here if not x.startswith("data.template_args.")}
  assert len(named) > 12
  assert not named - known


def test_configs_page_lists_every_option():
  text = (commands.ROOT / "configs/README.md").read_text()
  for name, _, metadata in configs.walk(configs.Config()):
    section, _, option = name.rpartition(".")
    row = rf"^\| {f'`{section}`' if section else '.none.'} \|.*`{option}`"
    assert not metadata or re.search(row, text, re.MULTILINE), name


def test_targets_of_links_exist():
  for page in PAGES:
    text = pages.prose(page)
    targets = re.findall(r"\]\(([^)\s]+)[^)]*\)", text)
    targets += re.findall(r'(?:src|srcset|href)="([^"]+)"', text)
    for target in targets:
      file, _, anchor = target.partition("#")
      if re.match(r"https?:|mailto:", file):
        continue
      linked = (page.parent / file).resolve() if file else page
      assert linked.exists(), f"{page}: {target}"
      if anchor and linked.suffix == ".md":
        assert anchor in pages.anchors(linked), f"{page}: {target}"


def test_page_of_public_names_is_current():
  assert api_page.PAGE.read_text() == api_page.text(), (
    "run: python -m tests.helpers.api_page"
  )
