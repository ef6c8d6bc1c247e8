"""The repository's pages of documentation, and what they tell to type."""

from collections.abc import Iterator
import pathlib
import re
import shlex
import textwrap

import commands

# A fenced block, perhaps within a list, and what language it is in.
_BLOCK = re.compile(
  r"^( *)```([\w+-]*)[^\n]*\n(.*?)^\1```$", re.DOTALL | re.MULTILINE
)


def pages() -> list[pathlib.Path]:
  """Every README.md, and what .github holds."""
  found = [*commands.ROOT.glob("*.md"), *commands.ROOT.glob(".github/*.md")]
  for folder in commands.ROOT.iterdir():  # not what is built or installed
    if folder.is_dir() and folder.name[0] != "." and folder.name != "runs":
      found += folder.rglob("README.md")
  return sorted(found)


def blocks(path: pathlib.Path, *languages: str) -> Iterator[str]:
  for _, language, text in _BLOCK.findall(path.read_text()):
    if language in languages:
      yield textwrap.dedent(text)


def prose(path: pathlib.Path) -> str:
  """A page without its fenced blocks."""
  return _BLOCK.sub("", path.read_text())


def files(path: pathlib.Path) -> dict[str, str]:
  """Blocks of a page that are files: their first line is `# NAME.py`."""
  found = {}
  for text in blocks(path, "python"):
    if name := re.match(r"# ([\w/]+\.py)\n", text):
      found[name[1]] = text
  return found


def shell_commands(path: pathlib.Path) -> Iterator[list[str]]:
  """Every command of a page's shell blocks, as words; $NAME is 1."""
  for block in blocks(path, "sh", "bash"):
    known = re.sub(r"\$\{?\w+\}?", "1", block.replace("\\\n", " "))
    for line in known.splitlines():
      lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
      lexer.whitespace_split, words = True, []
      for word in lexer:
        if set(word) <= set("();<>|&"):
          yield words
          words = []
        else:
          words.append(word)
      yield words


def anchors(path: pathlib.Path) -> set[str]:
  """What a link can name of a page: its headings, as GitHub writes them."""
  headings = re.findall(r"^#+ +(.*)$", prose(path), re.MULTILINE)
  kept = [re.sub(r"[^\w\- ]", "", text.lower()) for text in headings]
  return {text.strip().replace(" ", "-") for text in kept}
