"""Checksums of a directory's files, in a file that `sha256sum -c` reads too."""

from concurrent import futures
import hashlib
import os
import pathlib

NAME = "SHA256SUMS"


def write(directory: pathlib.Path) -> None:
  """Writes down what the files in `directory`, at any depth, are now."""
  files = sorted(x for x in directory.rglob("*") if x.is_file())
  lines = (
    f"{digest}  {file.relative_to(directory).as_posix()}\n"
    for file, digest in zip(files, _digests(files), strict=True)
  )
  with (directory / NAME).open("w", encoding="utf-8") as file:
    file.write("".join(lines))
    file.flush()
    os.fsync(file.fileno())


def flaw(directory: pathlib.Path) -> str:
  """What is wrong with a file that `write` saw in `directory`; "" for nothing.

  Files that have come since are nobody's concern.
  """
  try:
    lines = (directory / NAME).read_text("utf-8").splitlines()
  except (OSError, ValueError):
    return f"{NAME} is missing or unreadable"
  pairs = [line.partition("  ")[::2] for line in lines]
  if not pairs:
    return f"{NAME} is empty"
  files = [directory / name for _, name in pairs]
  for (digest, name), found in zip(pairs, _digests(files), strict=True):
    if not found:
      return f"{name} is missing or unreadable"
    if found != digest:
      return f"{name} is not as it was written"
  return ""


def _digests(files: list[pathlib.Path]) -> list[str]:
  """The SHA-256 of each file; empty where it cannot be read."""
  with futures.ThreadPoolExecutor(4) as pool:  # hashing releases the GIL
    return [*pool.map(_digest, files)]


def _digest(path: pathlib.Path) -> str:
  try:
    with path.open("rb") as file:
      return hashlib.file_digest(file, "sha256").hexdigest()
  except (OSError, ValueError):
    return ""
