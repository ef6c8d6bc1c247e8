"""Data sets of the hub: rows of its Parquet branch, or of its cache."""

import types
from unittest import mock

import huggingface_hub
from huggingface_hub import constants, errors
import pytest

from dppo_jax.data import hub, sources
from dppo_jax.errors import Unreachable, UserError
from dppo_jax.models import hf
from tests.helpers.problems import ROWS
from tests.helpers.sources import write_parquet

COMMIT = "0123456789abcdef" * 2 + "01234567"
FILES = {
  "main/train/0000.parquet": ROWS[:2],
  "main/train/0001.parquet": ROWS[2:],
  "main/test/0000.parquet": ROWS[:1],
  "socratic/train/0000.parquet": ROWS[1:],
}


def _fill(cache, name, files):
  """Writes the hub's cache of a data set; returns the directory of files."""
  folder = cache / f"datasets--{name.replace('/', '--')}"
  ref = folder / "refs" / hub.REVISION
  ref.parent.mkdir(parents=True)
  ref.write_text(COMMIT)
  for path, rows in files.items():
    file = folder / "snapshots" / COMMIT / path
    file.parent.mkdir(parents=True, exist_ok=True)
    write_parquet(file, rows)
  return folder / "snapshots" / COMMIT


@pytest.fixture
def cache(tmp_path, monkeypatch):
  """The hub's cache with two data sets, without a connection."""
  monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
  monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
  _fill(tmp_path, "openai/gsm8k", FILES)
  _fill(tmp_path, "a/one", {"default/train/0000.parquet": ROWS})
  return tmp_path


def _columns(source, **options):
  return [row.columns for row in sources.read(source, **options)[0]]


def test_a_split_has_the_rows_of_its_files_in_order(cache):
  assert _columns("hf:openai/gsm8k:main:train") == ROWS
  assert _columns("hf:openai/gsm8k:main") == ROWS
  assert _columns("hf:openai/gsm8k:main:test") == ROWS[:1]
  assert _columns("hf:openai/gsm8k:socratic") == ROWS[1:]
  assert _columns("hf:a/one") == ROWS
  assert _columns("hf:a/one::train", limit=1) == ROWS[:1]


def test_rows_and_sets_are_named_after_the_data_set(cache):
  without_id = {"problem": "p", "answer": "1"}
  _fill(cache, "b/two", {"default/train/0000.parquet": [without_id]})
  assert sources.read("hf:b/two")[0][0].id == "two/0"
  named = sources.parse_named("hf:openai/gsm8k:main:test")
  assert named == {"gsm8k": "hf:openai/gsm8k:main:test"}


@pytest.mark.parametrize(
  "source",
  ["hf:openai/gsm8k", "hf:openai/gsm8k:Main", "hf:openai/gsm8k:main:x"],
)
def test_an_unknown_config_or_split_lists_those_that_exist(cache, source):
  with pytest.raises(UserError, match="no split") as error:
    sources.read(source)
  choices = str(error.value).rpartition("use ")[2].split(", ")
  assert choices == [
    "hf:openai/gsm8k:main:test",
    "hf:openai/gsm8k:main:train",
    "hf:openai/gsm8k:socratic:train",
  ]


def test_a_data_set_that_is_not_cached_is_an_error_offline(cache):
  with pytest.raises(UserError, match="cannot fetch hf:c/three:main") as error:
    sources.read("hf:c/three:main")
  assert (
    f"hf download c/three --repo-type=dataset --revision={hub.REVISION}"
    in (str(error.value))
  )
  with pytest.raises(UserError, match="cannot fetch"):
    sources.read("hf:no/such/name")


def test_an_interrupted_download_is_not_the_data_set(cache):
  gap = {f"default/train/{x}.parquet": ROWS for x in ("0000", "0002")}
  _fill(cache, "d/gap", gap)
  with pytest.raises(
    UserError, match=r"not in the cache.* run `hf download d/g"
  ):
    sources.read("hf:d/gap")
  folder = _fill(cache, "d/cut", {"default/train/0000.parquet": ROWS})
  assert _columns("hf:d/cut") == ROWS
  blob = folder.parents[1] / "blobs" / "1f.incomplete"
  blob.parent.mkdir()
  blob.touch()
  with pytest.raises(UserError, match="run `hf download d/cut"):
    sources.read("hf:d/cut")


def test_a_data_set_without_parquet_files_is_an_error(cache):
  _fill(cache, "d/four", {"train.parquet": ROWS})
  with pytest.raises(UserError, match="has no Parquet files of it"):
    sources.read("hf:d/four")


def test_only_the_files_of_the_split_are_downloaded(tmp_path, monkeypatch):
  directory = _fill(tmp_path, "openai/gsm8k", FILES)
  downloads = []

  def download(name, **options):
    downloads.append((name, options))
    return str(directory)

  def info(name, *, revision, timeout):
    assert (name, revision) == ("openai/gsm8k", hub.REVISION) and timeout
    names = [".gitattributes", *FILES]
    siblings = [types.SimpleNamespace(rfilename=x) for x in names]
    return types.SimpleNamespace(siblings=siblings)

  monkeypatch.setattr(huggingface_hub, "dataset_info", info)
  monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
  assert _columns("hf:openai/gsm8k:main:test") == ROWS[:1]
  ((name, options),) = downloads
  assert name == "openai/gsm8k" and options == {
    "repo_type": "dataset",
    "revision": hub.REVISION,
    "allow_patterns": "main/test/*",
  }


def _answer(status: int) -> Exception:
  error = Exception(f"status {status}")
  error.response = types.SimpleNamespace(status_code=status)
  return error


@pytest.mark.parametrize(
  ("error", "kind"),
  [
    (_answer(404), UserError),
    (_answer(429), Unreachable),
    (_answer(503), Unreachable),
    (Exception("the connection was closed"), Unreachable),
    (ConnectionRefusedError(111, "refused"), Unreachable),
    (errors.OfflineModeIsEnabled("offline"), UserError),
    (OSError(28, "No space left on device"), UserError),
  ],
  ids=lambda x: str(x)[:20],
)
def test_a_hub_that_does_not_answer_can_be_tried_again(
  monkeypatch, error, kind
):
  for name in ("dataset_info", "model_info", "snapshot_download"):
    monkeypatch.setattr(huggingface_hub, name, mock.Mock(side_effect=error))
  for fetch, name in ((hub.fetch, "hf:a/b"), (hf.fetch, "a/b")):
    with pytest.raises(UserError, match="cannot fetch") as raised:
      fetch(name)
    assert raised.type is kind


def test_a_revision_is_a_part_of_the_name(cache, monkeypatch):
  old = "f" * 40
  folder = cache / "datasets--a--one" / "snapshots" / old / "default" / "train"
  folder.mkdir(parents=True)
  write_parquet(folder / "0000.parquet", ROWS[:1])
  assert (
    _columns(f"hf:a/one@{old}") == ROWS[:1] and _columns("hf:a/one") == ROWS
  )
  named = sources.parse_named(f"hf:a/one@{old}:default")
  assert named == {"one": f"hf:a/one@{old}:default"}
  asked = mock.Mock(return_value="/cache")
  for name in ("model_info", "snapshot_download"):
    monkeypatch.setattr(huggingface_hub, name, asked)
  hf.fetch("a/b@v1")
  assert [(x.args, x.kwargs["revision"]) for x in asked.call_args_list] == [
    (("a/b",), "v1")
  ] * 2


@pytest.mark.parametrize(
  "hub_id", ["./model", "/a/b", "a/b/c", "a b", "model/"]
)
def test_a_path_or_malformed_name_is_no_reason_to_try_again(
  tmp_path, monkeypatch, hub_id
):
  monkeypatch.chdir(tmp_path)
  (tmp_path / "model").mkdir()
  with pytest.raises(UserError, match=r"config\.model\.path") as error:
    hf.fetch(hub_id)
  assert not isinstance(error.value, Unreachable)
  with pytest.raises(UserError) as error:
    sources.read(f"hf:{hub_id}")
  assert not isinstance(error.value, Unreachable)


def test_a_directory_with_the_form_of_a_name_is_named(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  (tmp_path / "models" / "mine").mkdir(parents=True)
  silent = mock.Mock(side_effect=OSError("no route"))
  monkeypatch.setattr(huggingface_hub, "model_info", silent)
  monkeypatch.setattr(huggingface_hub, "snapshot_download", silent)
  with pytest.raises(UserError, match=r"pass it as config\.model\.path"):
    hf.fetch("models/mine")
