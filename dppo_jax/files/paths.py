"""Paths as users write them, made absolute at the entry of a command."""

import os
import re

from dppo_jax.files import storage


def absolute(where: str) -> str:
  """Returns a path without `~` and relative parts; "" and URLs unchanged."""
  if not where or storage.is_url(where):
    return where
  return os.path.abspath(os.path.expanduser(where))


def last_parts(text: str) -> str:
  """Removes the directories from all paths in a text such as `a=x/y,z/w`."""
  return re.sub("[^,=]*/", "", text)


def of_code(text: str) -> str:
  """Makes the files in `NAME,FILE.py:NAME:...,MODULE:NAME` absolute."""
  references = (x.partition(".py:") for x in text.split(","))
  return ",".join(
    f"{absolute(file.strip())}.py:{name}" if marker else file
    for file, marker, name in references
  )
