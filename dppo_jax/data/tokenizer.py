"""Text to token ids and back, for checkpoints and for the arithmetic task."""

from collections.abc import Iterator, Mapping, Sequence
import contextlib
import datetime
import functools
import json
import os
import pathlib
import re
import resource
from typing import Any

from dppo_jax.data.sources import Prompt, is_begun, text_of
from dppo_jax.errors import UserError, first_line
from dppo_jax.files import json_object

# Today in every chat template, so that a resumed run has the same prompts. This
# is the date of Llama's own templates where they cannot ask for today.
DATE = datetime.date(2024, 7, 26)
_TEMPLATE_BYTES = 1 << 30  # that a chat template may allocate
_MAX_CHARS = 10**7  # of a prompt
_CODES = "a A b B d -d e j m -m U w W y Y c x F D H I M S p X T".split()
_PINNED_DATE = (
  "{% macro strftime_now(format) %}{{ format"
  + "".join(f"|replace('%{x}','{DATE.strftime(f'%{x}')}')" for x in _CODES)
  + " }}{% endmacro %}{{ '' }}"  # a newline after this is kept
)


class CharacterTokenizer:
  r"""One token for each character of the arithmetic task, and for `\boxed{`.

  `encode` and `decode` leave out special tokens. `prompt` returns the text that
  the model reads before its answer, and `encode_prompt` the ids of that text.

  Attributes:
    vocab_size: number of ids; an embedding may have more rows.
    stop_ids: ids that end a completion; the first is the one to train on.
    stop_warning: says which end of a turn is no stop id; empty if none.
    pad_id: for the generation config of an export; ours fill with 0.
  """

  # No symbol starts with another. 24 symbols: 8 devices can split them evenly.
  SYMBOLS = ("<pad>", "<eos>", "\\boxed{", *"}0123456789+-*/=;,() ")
  vocab_size, pad_id, stop_ids = len(SYMBOLS), 0, (1,)
  stop_warning = ""

  def __init__(self):
    self._ids = {symbol: i for i, symbol in enumerate(self.SYMBOLS) if i > 1}
    symbols = "|".join(map(re.escape, self._ids))
    self._pattern = re.compile(rf"{symbols}|[\s\S]")

  def encode(self, text: str) -> list[int]:
    """Returns the ids of `text`; raises UserError for other characters."""
    try:
      return [self._ids[symbol] for symbol in self._pattern.findall(text)]
    except KeyError as error:
      raise UserError(
        f"character {error} of {text!r} is unknown to the tokenizer of the "
        "arithmetic task: set config.model.path or config.model.hub_id"
      ) from error

  def prompt(self, prompt: Prompt, tools: Any = None) -> str:
    return _plain(prompt, tools)

  def encode_prompt(self, prompt: Prompt, tools: Any = None) -> list[int]:
    return self.encode(self.prompt(prompt, tools))

  def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
    first = 2 if skip_special_tokens else 0
    return "".join(self.SYMBOLS[i] for i in ids if i >= first)

  def save(self, path: str | os.PathLike) -> None:
    """Writes the tokenizer's files for transformers into a directory."""
    import tokenizers  # imported with transformers, which takes a second
    from tokenizers import decoders, models, pre_tokenizers

    pad, eos, *_ = self.SYMBOLS
    ids = {symbol: i for i, symbol in enumerate(self.SYMBOLS)}
    # The unknown token is not in the vocabulary, so unknown text raises.
    words = tokenizers.Tokenizer(models.WordLevel(ids, unk_token="<unknown>"))
    pattern = tokenizers.Regex(self._pattern.pattern)
    words.pre_tokenizer = pre_tokenizers.Split(pattern, "isolated")
    words.decoder = decoders.Fuse()
    words.add_special_tokens([pad, eos])
    words.save(os.path.join(path, "tokenizer.json"))
    settings = {
      "tokenizer_class": "PreTrainedTokenizerFast",
      "pad_token": pad,
      "eos_token": eos,
      "clean_up_tokenization_spaces": False,
      "model_input_names": ["input_ids", "attention_mask"],
    }
    file = pathlib.Path(path, "tokenizer_config.json")
    file.write_text(json.dumps(settings, indent=2), encoding="utf-8")


class PretrainedTokenizer:
  """A checkpoint's tokenizer with its chat template, if it has one.

  It has the methods of `CharacterTokenizer`.
  """

  def __init__(self, path: str, template_args: Mapping[str, Any] | None = None):
    """Reads the tokenizer; never runs code that comes with it.

    Args:
      path: directory of the checkpoint.
      template_args: arguments of the template; `chat_template` replaces it.
    """
    names = ("tokenizer.json", "tokenizer.model", "vocab.json")
    if not any(os.path.exists(os.path.join(path, name)) for name in names):
      raise UserError(f"config.model.path {path!r} has no {' or '.join(names)}")
    if not os.path.exists(os.path.join(path, "tokenizer_config.json")):
      # transformers would drop <s> and padding, or take its own model's tokens.
      raise UserError(
        f"config.model.path {path!r} has no tokenizer_config.json, which names "
        "the special tokens: copy it from the original checkpoint"
      )
    # Suppresses transformers' warning that PyTorch is not installed.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    import transformers  # takes a second, which the arithmetic task can spare

    self._path = path
    self._template_args = dict(template_args or {})
    load = transformers.AutoTokenizer.from_pretrained
    try:
      self._tokenizer = load(path, trust_remote_code=False)
    except Exception as error:  # of many types
      raise UserError(
        f"the tokenizer in config.model.path {path!r} cannot be read: "
        f"{first_line(error)}; its files may be damaged or need code of their "
        "own, which is never run"
      ) from error
    self.vocab_size = len(self._tokenizer)
    self.pad_id = self._tokenizer.pad_token_id or 0
    self._has_template = bool(
      self._tokenizer.chat_template or "chat_template" in self._template_args
    )
    if self._template_args and not self._has_template:
      raise UserError(
        f"config.data.template_args: {path!r} has no chat template"
      )

  @functools.cached_property
  def stop_ids(self) -> tuple[int, ...]:
    """Stop ids, first that which the template writes after an answer.

    They are read on demand: config.rollout.stop_ids may replace them.
    """
    ids = find_stop_ids(self._path, self._tokenizer.eos_token_id)
    return tuple(sorted(ids, key=lambda x: x != self._turn_end))

  @property
  def stop_warning(self) -> str:
    turn_end = self._turn_end
    if turn_end is None or turn_end in self.stop_ids:
      return ""
    token = self._tokenizer.convert_ids_to_tokens
    return (
      "completions stop at "
      f"{' or '.join(map(repr, token([*self.stop_ids])))}, as "
      "generation_config.json says, but the chat template ends turns with "
      f"{token(turn_end)!r}: to stop there too, set "
      f"config.rollout.stop_ids='{(turn_end, *self.stop_ids)}'"
    )

  @functools.cached_property
  def _turn_end(self) -> int | None:
    """End of text in one of the checkpoint's files that ends a turn."""
    if not self._has_template:
      return None
    known = {self._tokenizer.eos_token_id}.union(
      _read_eos_ids(self._path, "generation_config.json"),
      _read_eos_ids(self._path, "config.json"),
    )
    answer = "4711"
    turns = [
      {"role": role, "content": answer} for role in ("user", "assistant")
    ]
    with contextlib.suppress(Exception):  # a template may raise anything
      finished = {"continue_final_message": False}
      text = self._render(turns, self._template_args | finished)
      after = self.encode(text.rpartition(answer)[2])
      return next((x for x in after if x in known), None)
    return None

  def encode_prompt(self, prompt: Prompt, tools: Any = None) -> list[int]:
    text = self.prompt(prompt, tools)
    if self._has_template:  # which writes special tokens itself
      return self.encode(text)
    ids = self.encode(text, add_special_tokens=True)
    # Some tokenizers append the end of text, which no completion follows.
    return ids[:-1] if ids[-1:] == [self._tokenizer.eos_token_id] else ids

  def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
    if lone := re.search("[\ud800-\udfff]", text):
      raise UserError(
        f"character {lone[0]!r} of {text!r} is half of a surrogate pair, which "
        "no tokenizer reads"
      )
    return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

  def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
    return self._tokenizer.decode(
      [*map(int, ids)],
      skip_special_tokens=skip_special_tokens,
      clean_up_tokenization_spaces=False,
    )

  def prompt(self, prompt: Prompt, tools: Any = None) -> str:
    """Returns the prompt as rendered by the chat template, if there is one.

    If the last message is the assistant's, a completion continues it.

    Args:
      tools: JSON schemas of tools, or JSON text of them, for the template.
    """
    if not self._has_template:
      return _plain(prompt, tools)
    if isinstance(prompt, str):
      prompt = [{"role": "user", "content": prompt}]
    continuation: dict[str, Any] = {
      "continue_final_message": is_begun(prompt),
      "add_generation_prompt": not is_begun(prompt),
    }
    try:
      tools = json.loads(tools) if isinstance(tools, str) else tools
      continuation["tools"] = tools or None
      return self._render(prompt, continuation | self._template_args)
    except Exception as error:  # a template may raise anything
      raise UserError(
        f"the chat template of {self._path!r} rejects the prompt: "
        f"{first_line(error)}; check the roles in config.data.template, "
        "the arguments in config.data.template_args and the column 'tools'"
      ) from error

  def _render(self, messages: list[dict[str, str]], args: dict) -> str:
    choice = args.get("chat_template"), args.get("tools")
    template = _PINNED_DATE + self._tokenizer.get_chat_template(*choice)
    args = args | {"chat_template": template, "tokenize": False}
    with _limited_memory():
      text = self._tokenizer.apply_chat_template(messages, **args)
    if len(text) > _MAX_CHARS:
      raise ValueError(f"it gives {len(text):,} characters")
    return text

  def save(self, path: str | os.PathLike) -> None:
    """Puts the chat template of the config into a copy of the files."""
    if template := self._template_args.get("chat_template"):
      template = self._tokenizer.get_chat_template(template)
      for file in pathlib.Path(path).glob("chat_template*"):
        file.unlink()
      file = pathlib.Path(path, "tokenizer_config.json")
      settings = json_object.read(file) | {"chat_template": template}
      file.write_text(json.dumps(settings, indent=2), encoding="utf-8")


Tokenizer = CharacterTokenizer | PretrainedTokenizer


@contextlib.contextmanager
def _limited_memory() -> Iterator[None]:
  """Makes a chat template that fills the memory raise MemoryError, on Linux."""
  limits = resource.getrlimit(resource.RLIMIT_AS)
  with contextlib.suppress(OSError, ValueError):
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + _TEMPLATE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limits[1]))
  try:
    yield
  finally:
    resource.setrlimit(resource.RLIMIT_AS, limits)


def _plain(prompt: Prompt, tools: Any) -> str:
  """Returns a prompt without template; raises UserError if that loses keys."""
  messages = [] if isinstance(prompt, str) else prompt
  keys = set(["tools"] if tools else []).union(*messages)
  if lost := sorted(keys - {"role", "content"}):
    raise UserError(
      f"without a chat template, {', '.join(lost)} of messages would be lost"
    )
  return text_of(prompt, with_system=True)


def find_stop_ids(path: str, eos_id: int | None) -> tuple[int, ...]:
  """Returns eos_token_id of generation_config.json, the ends of completions.

  If it has none, config.json and the tokenizer (`eos_id`) name them.
  """
  ids = _read_eos_ids(path, "generation_config.json")
  if not ids:
    ids = _read_eos_ids(path, "config.json")
    ids += [] if eos_id is None else [eos_id]
  if not ids:
    raise UserError(
      f"no eos_token_id in generation_config.json, config.json or the "
      f"tokenizer of {path!r}: set config.rollout.stop_ids"
    )
  return tuple(dict.fromkeys(ids))


def _read_eos_ids(path: str, name: str) -> list[int]:
  file = pathlib.Path(path, name)
  kinds = {"eos_token_id": int | list[int] | None}
  content = json_object.read(file, kinds) if file.exists() else {}
  ids = content.get("eos_token_id")
  return [] if ids is None else ids if isinstance(ids, list) else [ids]
