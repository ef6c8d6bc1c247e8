"""Pages of documentation, and the commands and files in them."""

from collections.abc import Iterator
import pathlib
import re
import shlex
import textwrap

from tests.helpers import commands

# A fenced block, perhaps within a list, and its language.
_BLOCK = re.compile(
  r"^( *)```([\w+-]*)[^\n]*\n(.*?)^\1```$", re.DOTALL | re.MULTILINE
)


def pages() -> list[pathlib.Path]:
  """Every page of the repository."""
  paths = [*commands.ROOT.glob("*.md"), *commands.ROOT.glob(".github/*.md")]
  for folder in commands.ROOT.iterdir():  # without installed packages
    if folder.is_dir() and folder.name[0] != "." and folder.name != "runs":
      paths += folder.rglob("*.md")
  return sorted(paths)


def labelled_blocks(
  path: pathlib.Path, *languages: str
) -> Iterator[tuple[str, str]]:
  """Yields the language and text of each block."""
  for _, language, text in _BLOCK.findall(path.read_text()):
    if language in languages:
      yield language, textwrap.dedent(text)


def blocks(path: pathlib.Path, *languages: str) -> Iterator[str]:
  for _, text in labelled_blocks(path, *languages):
    yield text


def prose(path: pathlib.Path) -> str:
  """A page without its fenced blocks."""
  return _BLOCK.sub("", path.read_text())


def files(path: pathlib.Path) -> dict[str, str]:
  """Blocks of a page that are files: their first line is `# NAME.py`."""
  names = (
    (re.match(r"# ([\w/]+\.py)\n", x), x) for x in blocks(path, "python")
  )
  return {match[1]: text for match, text in names if match}


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
  """Anchors of a page's headings, as GitHub makes them."""
  headings = re.findall(r"^#+ +(.*)$", prose(path), re.MULTILINE)
  kept = [re.sub(r"[^\w\- ]", "", text.lower()) for text in headings]
  return {text.strip().replace(" ", "-") for text in kept}
