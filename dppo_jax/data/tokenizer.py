"""Text to token ids and back, for checkpoints and for the arithmetic task."""

from collections.abc import Mapping, Sequence
import functools
import json
import os
import re
import reprlib
from typing import Any, Protocol

from dppo_jax.data import template_probe
from dppo_jax.data.prompts import Message, Prompt

_NO_TEMPLATE = "no chat template"


class Tokenizer(Protocol):
  """What every tokenizer offers.

  Attributes:
    vocab_size: ids are below it; a checkpoint's embedding may have more rows.
    stop_ids: each ends a completion; the first is the one to train on.
    pad_id: fills arrays and is never read, since lengths travel beside them.
    template_note: what a user should know of the chat template; may be empty.
  """

  vocab_size: int
  stop_ids: tuple[int, ...]
  pad_id: int
  template_note: str

  def encode(self, text: str) -> list[int]:
    """Ids of `text` alone, with nothing added."""
    ...

  def prompt(self, prompt: Prompt) -> str:
    """The whole of a prompt as text, up to where the answer begins."""
    ...

  def encode_prompt(self, prompt: Prompt) -> list[int]:
    """Ids of the whole of a prompt."""
    ...

  def decode(self, ids: Sequence[int]) -> str:
    """The text of `ids`, special tokens dropped."""
    ...


class CharacterTokenizer:
  r"""One token for each character of the arithmetic task, and for `\boxed{`."""

  # None begins another. 24 in all: the vocabulary divides over 8 devices.
  SYMBOLS = ("<pad>", "<eos>", "\\boxed{", *"}0123456789+-*/=;,() ")

  def __init__(self):
    self.vocab_size = len(self.SYMBOLS)
    self.pad_id = 0
    self.stop_ids = (1,)
    self.template_note = _NO_TEMPLATE
    self._ids = {symbol: i for i, symbol in enumerate(self.SYMBOLS) if i > 1}
    self._symbol = re.compile("|".join(map(re.escape, self._ids)))

  def encode(self, text: str) -> list[int]:
    """Ids of `text`, symbol by symbol.

    Raises:
      ValueError: if a character is no symbol.
    """
    ids, start = [], 0
    while start < len(text):
      match = self._symbol.match(text, start)
      if match is None:
        raise ValueError(
          f"character {text[start]!r} of {text!r} is unknown to the "
          "arithmetic tokenizer: set config.model.path or "
          "config.model.hub_id to a checkpoint with a tokenizer of its own"
        )
      ids.append(self._ids[match.group()])
      start = match.end()
    return ids

  def prompt(self, prompt: Prompt) -> str:
    return prompt if isinstance(prompt, str) else _plain_text(prompt)

  def encode_prompt(self, prompt: Prompt) -> list[int]:
    return self.encode(self.prompt(prompt))

  def decode(self, ids: Sequence[int]) -> str:
    return "".join(self.SYMBOLS[i] for i in ids if i > 1)

  def save(self, path: str | os.PathLike) -> None:
    """Writes files from which transformers makes the same tokenizer.

    Args:
      path: an existing directory.
    """
    import tokenizers  # with transformers, which takes a second
    from tokenizers import decoders, models, pre_tokenizers

    pad, eos, *_ = self.SYMBOLS
    ids = {symbol: i for i, symbol in enumerate(self.SYMBOLS)}
    # It has no token for what is unknown, and so refuses that as we do.
    made = tokenizers.Tokenizer(models.WordLevel(ids, unk_token="<unknown>"))
    pattern = tokenizers.Regex(rf"{self._symbol.pattern}|[\s\S]")
    made.pre_tokenizer = pre_tokenizers.Split(pattern, "isolated")
    made.decoder = decoders.Fuse()
    made.add_special_tokens([pad, eos])
    made.save(os.path.join(path, "tokenizer.json"))
    settings = {
      "tokenizer_class": "PreTrainedTokenizerFast",
      "pad_token": pad,
      "eos_token": eos,
      "clean_up_tokenization_spaces": False,
      "model_input_names": ["input_ids", "attention_mask"],
    }
    file = os.path.join(path, "tokenizer_config.json")
    with open(file, "w", encoding="utf-8") as opened:
      json.dump(settings, opened, indent=2)


class PretrainedTokenizer:
  """A checkpoint's own tokenizer and, where it has one, chat template."""

  def __init__(
    self,
    path: str,
    system: str = "",
    instruction: str = "",
    template_args: Mapping[str, Any] | None = None,
  ):
    """Reads the tokenizer.

    Args:
      path: directory of the checkpoint.
      system: system message; where empty, what the template does without one.
        Without a template it comes first, a blank line behind it.
      instruction: follows what the user says last, on a line of its own; may be
        empty.
      template_args: for the chat template, e.g. `enable_thinking`;
        `chat_template` is a template that takes the place of the checkpoint's.
    Raises:
      ValueError: if tokenizer files are missing or damaged.
    """
    _check_files(path)
    # Otherwise transformers says on import that it cannot find PyTorch.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    import transformers  # takes a second, which the arithmetic task can spare

    self._path = path
    self._system = system
    self._instruction = instruction
    self._template_args = dict(template_args or {})
    try:
      self._tokenizer = transformers.AutoTokenizer.from_pretrained(
        path,
        trust_remote_code=False,  # nor is the user asked to
      )
    except Exception as error:  # of many kinds, some without a word of the file
      raise ValueError(_damage(path, error)) from error
    self.vocab_size = len(self._tokenizer)
    self.pad_id = self._tokenizer.pad_token_id or 0
    self._has_template = bool(
      self._tokenizer.chat_template or self._template_args.get("chat_template")
    )
    self.template_note = "" if self._has_template else _NO_TEMPLATE
    if template_args and not self._has_template:
      self.template_note += ", so config.data.template_args does nothing"

  def check_template(self) -> None:
    """Tries the chat template, if there is one, on a short problem.

    Raises:
      ValueError: in one line, where it does not end or takes all memory.
    """
    if not self._has_template:
      return
    arguments = self._tokenizer.special_tokens_map | self._template_args
    given = arguments.pop("chat_template", None)
    try:
      template = self._tokenizer.get_chat_template(
        given, arguments.get("tools")
      )
      template_probe.check(template, self._messages("1+1="), arguments)
    except ValueError as error:
      reason = str(error).strip().splitlines()[0]
      raise ValueError(
        f"the chat template of {self._path!r} {reason}: give another as "
        "chat_template in config.data.template_args, or remove it from the "
        "checkpoint"
      ) from error

  @functools.cached_property
  def stop_ids(self) -> tuple[int, ...]:
    """Those the checkpoint names; a ValueError if it names none.

    Looked up when asked for, since config.rollout.stop_ids may replace them.
    """
    return find_stop_ids(self._path, self._tokenizer.eos_token_id)

  def encode(self, text: str) -> list[int]:
    return self._encode(text, add_special_tokens=False)

  def encode_prompt(self, prompt: Prompt) -> list[int]:
    # A template writes the beginning-of-sequence token, if there is one.
    text, is_plain = self.prompt(prompt), not self._has_template
    return self._encode(text, add_special_tokens=is_plain)

  def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
    try:
      return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
    except Exception as error:  # of Rust: a character that no token stands for
      raise ValueError(
        f"the tokenizer of {self._path!r} has no tokens for {text!r}: {error}"
      ) from error

  def decode(self, ids: Sequence[int]) -> str:
    ids = [int(i) for i in ids]
    return self._tokenizer.decode(ids, skip_special_tokens=True)

  def prompt(self, prompt: Prompt) -> str:
    """The text of the prompt, chat template and all.

    Raises:
      ValueError: if the chat template cannot make one.
    """
    messages = self._messages(prompt)
    if not self._has_template:
      return _plain_text(messages)
    try:
      return self._tokenizer.apply_chat_template(
        messages,
        tokenize=False,
        add_generation_prompt=True,
        **self._template_args,
      )
    except Exception as error:  # templates raise what they like
      reason = (str(error).strip() or type(error).__name__).splitlines()[0]
      raise ValueError(
        f"the chat template of {self._path!r} refuses the prompt: {reason}; "
        "where it has no place for a system message, leave config.data.system "
        "empty and use config.data.instruction; its arguments are "
        "config.data.template_args"
      ) from error

  def _messages(self, prompt: Prompt) -> list[Message]:
    """The prompt with the system message and the instruction."""
    if isinstance(prompt, str):
      prompt = [{"role": "user", "content": prompt}]
    messages = [dict(message) for message in prompt]
    said = [m for m in messages if m["role"] == "user"]
    if self._instruction and said:
      said[-1]["content"] += f"\n{self._instruction}"
    if not self._system:
      return messages
    if any(m["role"] == "system" for m in messages):
      raise ValueError(
        "the prompt has a system message of its own: leave config.data.system "
        "empty"
      )
    return [{"role": "system", "content": self._system}, *messages]


def _plain_text(messages: list[Message]) -> str:
  """What is said, one below the other, for want of a chat template."""
  roles = {m["role"] for m in messages} - {"system", "user"}
  if roles:
    raise ValueError(
      f"the prompt has a message of {min(roles)!r} but the tokenizer has no "
      "chat template: take a checkpoint with one, or make text of it with "
      "config.data.template"
    )
  return "\n\n".join(m["content"] for m in messages)


def find_stop_ids(path: str, eos_id: int | None) -> tuple[int, ...]:
  """Where a checkpoint says that its completions end.

  Args:
    path: directory of the checkpoint.
    eos_id: the tokenizer's own, None where it has none.
  Returns:
    All of generation_config.json's eos_token_id or, where that has none, those
    of config.json and the tokenizer.
  Raises:
    ValueError: if none of the three names one.
  """
  found = _eos_ids(path, "generation_config.json")
  if not found:
    found = _eos_ids(path, "config.json")
    found += [] if eos_id is None else [eos_id]
  if not found:
    raise ValueError(
      f"no eos_token_id in generation_config.json, config.json or the "
      f"tokenizer of {path!r}: set config.rollout.stop_ids"
    )
  return tuple(dict.fromkeys(found))


def _eos_ids(path: str, filename: str) -> list[int]:
  path = os.path.join(path, filename)
  if not os.path.exists(path):
    return []
  with open(path, encoding="utf-8") as file:
    try:
      ids = json.load(file).get("eos_token_id")
    except (ValueError, AttributeError, RecursionError) as error:
      raise ValueError(
        f"{path} is damaged, it is no JSON object ({error}): fetch it again"
      ) from error
  ids = [] if ids is None else ids if isinstance(ids, list) else [ids]
  if any(type(i) is not int or i < 0 for i in ids):
    raise ValueError(
      f"{path} sets eos_token_id to {reprlib.repr(ids)} but it must be ids of "
      "tokens: fetch it again, or set config.rollout.stop_ids"
    )
  return ids


def _check_files(path: str) -> None:
  """Passes over directories from which transformers can read a tokenizer."""

  def missing(*names: str) -> list[str]:
    return [n for n in names if not os.path.exists(os.path.join(path, n))]

  if not missing("tokenizer.json") or not missing("tokenizer.model"):
    return
  # Without tokenizer_config.json nothing says whose vocabulary this is.
  lacking = missing("vocab.json", "merges.txt", "tokenizer_config.json")
  if lacking:
    raise ValueError(
      f"no tokenizer in config.model.path {path!r}: it needs tokenizer.json, "
      "or tokenizer.model, or vocab.json with merges.txt and "
      f"tokenizer_config.json, of which {', '.join(lacking)} "
      f"{'is' if len(lacking) == 1 else 'are'} missing"
    )


def _damage(path: str, error: Exception) -> str:
  """Which file of a tokenizer cannot be read, and what to do about it."""
  for name in ("tokenizer.json", "tokenizer_config.json", "vocab.json"):
    file = os.path.join(path, name)
    if not os.path.exists(file):
      continue
    try:
      with open(file, encoding="utf-8") as text:
        json.load(text)
    except ValueError as damage:
      return f"{file} is damaged, it is no JSON ({damage}): fetch it again"
  if "custom code" in str(error):
    return (
      f"the tokenizer in config.model.path {path!r} is code of its own "
      "(auto_map), which is never run: take a checkpoint whose tokenizer "
      "transformers has, or remove auto_map where tokenizer.json says all"
    )
  reason = (str(error).strip() or type(error).__name__).splitlines()[0]
  return (
    f"the tokenizer in config.model.path {path!r} cannot be read: "
    f"{type(error).__name__}: {reason}; fetch its files again, all from one "
    "checkpoint"
  )
