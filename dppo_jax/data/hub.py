"""Data sets of the Hugging Face hub, as the Parquet files that it converts."""

from collections.abc import Callable
import functools
import pathlib
import re

from dppo_jax import errors
from dppo_jax.errors import UserError

# The hub writes every public data set to CONFIG/SPLIT/0000.parquet and so on of
# this branch, also one of JSON or CSV files.
REVISION = "refs/convert/parquet"
_FILE = re.compile(r"([^/]+)/([^/]+)/\d+\.parquet")
_SECONDS = 10  # timeout for a hub that does not answer


def fetch(source: str) -> list[str]:
  """Returns the Parquet files of a split, downloaded unless cached.

  Args:
    source: `hf:NAME[@REVISION][:CONFIG[:SPLIT]]`; by default the latest commit
      of the branch `REVISION`, the only config and the split `train`.
  Raises:
    UserError: if the hub has no such data set, config or split.
    Unreachable: if it does not answer, and the cache has none.
  """
  place, _, part = source.removeprefix("hf:").partition(":")
  name, _, revision = place.partition("@")
  revision = revision or REVISION
  config, _, split = part.partition(":")
  try:
    files, download = _open(name, revision)
    parts = sorted(
      {match.groups() for x in files if (match := _FILE.fullmatch(x))}
    )
    configs = {x for x, _ in parts}
    config = config or (configs.pop() if len(configs) == 1 else "")
    split = split or "train"
    if (config, split) in parts:
      path = pathlib.Path(
        download(allow_patterns=f"{config}/{split}/*"), config
      )
      shards = sorted(path.glob(f"{split}/*.parquet"))
      if [int(x.stem) for x in shards] != [*range(len(shards))]:
        raise FileNotFoundError("some of its files are not in the cache")
      return [*map(str, shards)]
  except Exception as error:  # the library's, its transport's or the system's
    raise errors.of_server(
      error,
      f"cannot fetch {source} ({errors.first_line(error)}): where "
      f"the hub is reachable, run `hf download {name} --repo-type=dataset "
      f"--revision={revision}`, which fills the cache, or name a file",
    ) from None
  choices = ", ".join(f"hf:{place}:{x}:{y}" for x, y in parts)
  raise UserError(
    f"{source}: there is no split {split!r} of config {config!r}: "
    + (f"use {choices}" if parts else "the hub has no Parquet files of it")
  )


def _open(name: str, revision: str) -> tuple[list[str], Callable[..., str]]:
  """Returns the files of a data set, and a function that downloads some.

  Without a connection these are the files of the cache.
  """
  import huggingface_hub  # slow to import, and few sources need it

  download = functools.partial(
    huggingface_hub.snapshot_download,
    name,
    repo_type="dataset",
    revision=revision,
  )
  try:
    # First, since snapshot_download waits forever for a silent hub.
    info = huggingface_hub.dataset_info(
      name, revision=revision, timeout=_SECONDS
    )
    return [x.rfilename for x in info.siblings or ()], download
  except Exception as reason:
    cached = functools.partial(download, local_files_only=True)
    try:
      directory = pathlib.Path(cached(allow_patterns=""))
    except Exception:
      raise reason from None
    if any(directory.parents[1].glob("blobs/*.incomplete")):
      raise reason  # a download was interrupted
    files = directory.rglob("*.parquet")
    return [x.relative_to(directory).as_posix() for x in files], cached
