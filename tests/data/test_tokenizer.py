"""Tokenizers: round trips, chat templates, stop ids, clear errors."""

import gzip
import json
import pathlib
import re
import resource
import shutil
import sys

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, processors

from dppo_jax import data
from dppo_jax.data import arithmetic, sources
from dppo_jax.data.tokenizer import (
  CharacterTokenizer,
  PretrainedTokenizer,
  find_stop_ids,
)
from dppo_jax.errors import UserError

REAL = pathlib.Path(__file__).parents[3] / "shared" / "data" / "tokenizers"
TEXTS = (
  "Hello world!",
  "How many eggs?\n\nJanet’s ducks lay $16$ — \\frac{1}{2} each.",
  "  spaces\tand 数学 \\boxed{\\left(3, \\pi\\right)} 🦆",
)
TEMPLATE = (
  "{{ bos_token }}{% for m in messages %}{{ m.role }} {{ m.content }} "
  "{% endfor %}{% if add_generation_prompt %}assistant"
  "{% if loud is defined %} LOUD{% endif %}{% endif %}"
)


@pytest.fixture(scope="module", params=["qwen2.5", "qwen3"])
def real(request, tmp_path_factory):
  """A directory with a real tokenizer, as a checkpoint would have it."""
  if not REAL.is_dir():
    pytest.skip("the real tokenizers are not available")
  path = tmp_path_factory.mktemp("real") / request.param
  path.mkdir()
  for file in (REAL / request.param).iterdir():
    if file.suffix == ".gz":
      (path / file.stem).write_bytes(gzip.decompress(file.read_bytes()))
    else:
      shutil.copyfile(file, path / file.name)
  return str(path)


@pytest.fixture(scope="module")
def tokenizer(real):
  return PretrainedTokenizer(real)


@pytest.fixture
def small(tmp_path):
  """A word-by-word tokenizer that begins every text with <s>."""
  words = "<s> </s> user system assistant LOUD one two be brief".split()
  tokenizer = tokenizers.Tokenizer(
    models.WordLevel({word: i for i, word in enumerate(words)}, "brief")
  )
  tokenizer.add_special_tokens(["<s>", "</s>"])
  tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
  tokenizer.post_processor = processors.TemplateProcessing(
    single="<s> $A", special_tokens=[("<s>", 0)]
  )
  tokenizer.save(str(tmp_path / "tokenizer.json"))

  def write(**config):
    config = {"bos_token": "<s>", "eos_token": "</s>", **config}
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return str(tmp_path)

  return write


# The tokenizer of the arithmetic task ---------------------------------------


def test_arithmetic_text_round_trips_and_boxed_is_one_token():
  tokenizer = CharacterTokenizer()
  for row in arithmetic.make(seed=1, count=200, max_operations=4):
    for text in (row.problem, row.solution):
      assert tokenizer.decode(tokenizer.encode(text)) == text
  assert len(tokenizer.encode(r"\boxed{12}")) == 4
  assert tokenizer.encode_prompt("1+2=") == tokenizer.encode("1+2=")
  ids = [tokenizer.encode(symbol) for symbol in tokenizer.SYMBOLS[2:]]
  assert sorted(ids) == [[i] for i in range(2, tokenizer.vocab_size)]
  assert tokenizer.decode([*tokenizer.encode("7"), 1, 0]) == "7"
  assert (tokenizer.pad_id, tokenizer.stop_ids) == (0, (1,))


@pytest.mark.parametrize(
  ("text", "unknown"), [("3x4=", "x"), ("\\box{3}", "\\"), ("<eos>", "<")]
)
def test_unknown_character_is_named(text, unknown):
  with pytest.raises(UserError, match=r"config\.model\.path") as error:
    CharacterTokenizer().encode(text)
  assert repr(unknown) in str(error.value)


# Real tokenizers ------------------------------------------------------------


def test_real_text_round_trips_and_specials_are_dropped(tokenizer):
  for text in TEXTS:
    assert tokenizer.decode(tokenizer.encode(text)) == text
  assert tokenizer.encode("Hello world!") == [9707, 1879, 0]
  prompt = tokenizer.encode_prompt("1+1?")
  assert max(prompt) < tokenizer.vocab_size
  assert "<|im_start|>" not in tokenizer.decode(prompt)
  ids = [*tokenizer.encode("1"), 151645, 151643]
  assert tokenizer.decode(ids) == "1"
  assert (tokenizer.stop_ids, tokenizer.pad_id) == ((151645,), 151643)


def test_real_chat_template(real, tokenizer):
  messages = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1+1?"},
  ]
  expected = (
    "<|im_start|>system\nBe brief.<|im_end|>\n"
    "<|im_start|>user\n1+1?<|im_end|>\n"
    "<|im_start|>assistant\n"
  )
  assert tokenizer.prompt(messages) == expected
  assert tokenizer.encode_prompt(messages) == tokenizer.encode(expected)
  silent = PretrainedTokenizer(real, {"enable_thinking": False})
  thought = "<think>\n\n</think>\n\n" if "qwen3" in real else ""
  assert silent.prompt(messages) == expected + thought


# Chat templates -------------------------------------------------------------


TALK = [
  {"role": "system", "content": "be"},
  {"role": "user", "content": "one"},
  {"role": "assistant", "content": "two"},
  {"role": "user", "content": "two"},
]


def test_prompt_goes_through_the_template_and_begins_once(small):
  path = small(chat_template=TEMPLATE)
  tokenizer = PretrainedTokenizer(path, {"loud": True})
  assert tokenizer.prompt("one") == "<s>user one assistant LOUD"
  text = "<s>system be user one assistant two user two assistant LOUD"
  assert tokenizer.prompt(TALK) == text
  words = text.replace("<s>", "<s> ").split()
  assert tokenizer.encode_prompt(TALK) == tokenizer.encode(" ".join(words))
  assert tokenizer.encode_prompt(TALK).count(0) == 1


def test_date_of_a_template_is_pinned_unless_it_is_set(small):
  template = (
    "{% if date_string is not defined %}"
    "{% set date_string = strftime_now('%d %b %Y') %}{% endif %}"
    "{{ date_string }}"
  )
  path = small(chat_template=template)
  assert PretrainedTokenizer(path).prompt("one") == "26 Jul 2024"
  args = {"date_string": "one"}
  assert PretrainedTokenizer(path, args).prompt("one") == "one"


def test_a_final_assistant_message_is_continued(small):
  template = TEMPLATE.replace("{{ m.content }} ", "{{ m.content }} </s> ")
  path = small(chat_template=template)
  tokenizer = PretrainedTokenizer(path)
  talk = "<s>system be </s> user one </s> assistant two"
  assert tokenizer.prompt(TALK[:3]) == talk
  assert PretrainedTokenizer(small()).prompt(TALK[:3]) == "be\n\none\n\ntwo"
  small(chat_template=template)
  finished = {"continue_final_message": False}
  tokenizer = PretrainedTokenizer(path, finished)
  assert tokenizer.prompt(TALK[:3]) == talk + " </s> "
  tokenizer = PretrainedTokenizer(path, finished | {"add_generation_prompt": 1})
  assert tokenizer.prompt(TALK[:3]) == talk + " </s> assistant"
  tokenizer = PretrainedTokenizer(path, {"add_generation_prompt": False})
  assert tokenizer.prompt(TALK[1:2]) == "<s>user one </s> "


def test_decoding_keeps_spaces_before_punctuation(small):
  tokenizer = PretrainedTokenizer(small(clean_up_tokenization_spaces=True))
  tokenizer._tokenizer.add_tokens(["!=", "n't"])
  text = "one != two n't"
  assert tokenizer.decode(tokenizer.encode(text)) == text


def test_half_a_character_is_named(small):
  tokenizer = PretrainedTokenizer(small())
  with pytest.raises(
    UserError, match=r"character '\\ud800' of 'one \\ud800' is"
  ):
    tokenizer.encode_prompt("one \ud800")


def test_without_template_a_prompt_is_plain_text_that_begins_once(small):
  tokenizer = PretrainedTokenizer(small())
  assert tokenizer.prompt(TALK[:2]) == "be\n\none"
  prompt = tokenizer.encode_prompt(TALK[:2])
  assert prompt == [0, *tokenizer.encode("be one")]
  assert 0 not in tokenizer.encode("one brief")


def test_chat_template_may_be_given_as_an_argument(small):
  args = {"chat_template": "brief {{ messages[0].content }}"}
  tokenizer = PretrainedTokenizer(small(), args)
  assert tokenizer.prompt("one") == "brief one"


@pytest.mark.parametrize(
  ("template", "args", "complaint"),
  [
    ("{{ raise_exception('no\nnot so') }}", {}, "rejects the prompt: .*no"),
    (TEMPLATE, {"tools": 3}, "config.data.template_args"),
  ],
)
def test_template_that_fails_is_named(small, template, args, complaint):
  tokenizer = PretrainedTokenizer(small(chat_template=template), args)
  with pytest.raises(UserError, match=complaint) as error:
    tokenizer.encode_prompt("one")
  assert "\n" not in str(error.value)


def test_arguments_without_a_template_are_rejected(small):
  with pytest.raises(
    UserError, match=r"template_args: .* has no chat template"
  ):
    PretrainedTokenizer(small(chat_template=None), {"enable_thinking": True})


# Files ----------------------------------------------------------------------


def test_code_that_comes_with_a_tokenizer_is_not_run(small, tmp_path):
  path = pathlib.Path(small())
  file = path / "tokenizer_config.json"
  config = json.loads(file.read_text())
  config["tokenizer_class"] = "MyTokenizer"
  config["auto_map"] = {"AutoTokenizer": ["mine.MyTokenizer", None]}
  file.write_text(json.dumps(config))
  (path / "mine.py").write_text(
    f"open({str(tmp_path / 'ran')!r}, 'w')\n"
    "from transformers import PreTrainedTokenizerFast as MyTokenizer\n"
  )
  with pytest.raises(UserError, match=r"code of their own, .* never run"):
    PretrainedTokenizer(str(path))
  assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
  ("name", "text"),
  [
    ("tokenizer.json", '{"version": '),
    ("tokenizer_config.json", "no"),
    ("tokenizer_config.json", None),
    ("tokenizer.json", None),
  ],
)
def test_damaged_or_missing_tokenizer_is_named(small, name, text):
  path = pathlib.Path(small())
  (path / name).write_text(text) if text else (path / name).unlink()
  with pytest.raises(UserError, match=r"config\.model\.path") as error:
    PretrainedTokenizer(str(path))
  assert str(path) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
  ("generation", "model", "eos", "expected"),
  [
    ({"eos_token_id": [7, 6, 7]}, {"eos_token_id": 8}, 9, (7, 6)),
    ({"eos_token_id": 0}, None, 9, (0,)),
    ({"eos_token_id": None}, {"eos_token_id": [8, 5]}, 9, (8, 5, 9)),
    (None, None, 0, (0,)),
  ],
)
def test_stop_ids(tmp_path, generation, model, eos, expected):
  with pytest.raises(UserError, match=r"config\.rollout\.stop_ids"):
    find_stop_ids(str(tmp_path), None)
  for name, config in (("generation_config", generation), ("config", model)):
    if config is not None:
      (tmp_path / f"{name}.json").write_text(json.dumps(config))
  assert find_stop_ids(str(tmp_path), eos) == expected


def test_the_end_of_an_answer_comes_first(small):
  """The first stop id of Gemma and Llama ends a text, not a turn."""
  path = pathlib.Path(small(chat_template=TEMPLATE + "{{ 'brief' }}"))
  ids = {"eos_token_id": [1, 9]}  # </s> and the word "brief"
  (path / "generation_config.json").write_text(json.dumps(ids))
  assert PretrainedTokenizer(str(path)).stop_ids == (9, 1)
  small()
  assert PretrainedTokenizer(str(path)).stop_ids == (1, 9)
  small(chat_template="{{ raise_exception('no') }}")
  assert PretrainedTokenizer(str(path)).stop_ids == (1, 9)


@pytest.mark.parametrize(
  ("end", "generation", "warning"),
  [
    ("</s>", 1, ""),
    ("</s>", [9, 1], ""),
    ("</s>", 9, "at 'brief'.* ends turns with '</s>': .*stop_ids='.1, 9.'"),
    ("two", 9, ""),  # neither config.json nor the tokenizer knows it
  ],
)
def test_a_turn_that_ends_in_no_stop_id_is_reported(
  small, end, generation, warning
):
  path = pathlib.Path(small(chat_template=TEMPLATE + "{{ ' " + end + "' }}"))
  (path / "config.json").write_text('{"eos_token_id": 1}')
  content = json.dumps({"eos_token_id": generation})
  (path / "generation_config.json").write_text(content)
  tokenizer = PretrainedTokenizer(str(path))
  assert re.search(warning or "^$", tokenizer.stop_warning)
  assert 1 in tokenizer.stop_ids or 9 in tokenizer.stop_ids


@pytest.mark.parametrize(
  "text", [b"{", b"[1]", b"\xff", b'{"eos_token_id": ["2"]}']
)
@pytest.mark.parametrize("name", ["generation_config.json", "config.json"])
def test_damaged_file_of_stop_ids_is_named(tmp_path, name, text):
  (tmp_path / name).write_bytes(text)
  with pytest.raises(UserError, match=f"cannot read .*/{name}"):
    find_stop_ids(str(tmp_path), None)


CALL = {
  "type": "function",
  "function": {"name": "add", "arguments": {"a": 1, "b": 2}},
}
TOOLS = [
  {
    "type": "function",
    "function": {
      "name": "add",
      "description": "Adds.",
      "parameters": {"type": "object", "properties": {"a": {"type": "number"}}},
    },
  }
]
CALLS = [
  {"role": "user", "content": "What is 1+2?"},
  {"role": "assistant", "content": None, "tool_calls": [CALL]},
  {"role": "tool", "content": "3"},
  {
    "role": "assistant",
    "content": "It is 3.",
    "reasoning_content": "The tool says so.",
  },
  {"role": "user", "content": "And 2+2?"},
]


def _their_prompt(path, messages, tools):
  import transformers

  theirs = transformers.AutoTokenizer.from_pretrained(path)
  return theirs.apply_chat_template(
    messages, tools=tools, add_generation_prompt=True, tokenize=False
  )


@pytest.mark.parametrize("as_text", [False, True])
def test_tools_and_their_calls_reach_the_template(real, tokenizer, as_text):
  """A column of tools may be JSON text."""
  tools = json.dumps(TOOLS) if as_text else TOOLS
  row = {"prompt": CALLS, "answer": "4", "tools": tools}
  rows, _ = sources.read(lambda: [row, {**row, "prompt": CALLS[:4]}])
  problems = data.prepare("train", rows[:1], tokenizer, 2000)
  ids = problems.tokens[0, : problems.lengths[0]]
  messages = [{k: x for k, x in m.items() if x is not None} for m in CALLS]
  expected = _their_prompt(real, messages, TOOLS)
  assert tokenizer.decode(ids, skip_special_tokens=False) == expected
  assert "Adds." in expected and '"name": "add"' in expected
  assert repr(expected) in problems.first_prompt


def test_every_key_of_a_message_reaches_the_template(small):
  template = "{% for m in messages %}{{ m.reasoning_content }}{% endfor %}"
  path = small(chat_template=template)
  row = {"prompt": [{**CALLS[3], "role": "user"}], "answer": "4"}
  (row,), _ = sources.read(lambda: [row])
  assert PretrainedTokenizer(path).prompt(row.problem) == "The tool says so."


def test_without_a_template_keys_that_would_be_lost_are_named(small):
  tokenizer = PretrainedTokenizer(small())
  (row,), _ = sources.read(lambda: [{"prompt": CALLS, "answer": "4"}])
  for words in (tokenizer, CharacterTokenizer()):
    with pytest.raises(UserError, match="reasoning_content, tool_calls"):
      words.prompt(row.problem)
    with pytest.raises(UserError, match="tools"):
      words.prompt("one", TOOLS)


def test_the_first_prompt_shows_what_the_model_reads(small):
  """Some tokenizers append the end of text, which no completion follows."""
  path = pathlib.Path(small())
  file = path / "tokenizer.json"
  words = tokenizers.Tokenizer.from_file(str(file))
  words.post_processor = processors.TemplateProcessing(
    "<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
  )
  words.save(str(file))
  tokenizer = PretrainedTokenizer(str(path))
  assert tokenizer.encode("one", add_special_tokens=True) == [0, 6, 1]
  assert tokenizer.encode_prompt("one") == [0, 6]
  row = sources.Row("a", "one two", "1")
  problems = data.prepare("train", [row], tokenizer, 64)
  assert problems.first_prompt.endswith("'<s> one two'")
  # But what a template writes is kept.
  (path / "chat_template.jinja").write_text("{{ messages[0].content }} </s>")
  tokenizer = PretrainedTokenizer(str(path))
  assert tokenizer.encode_prompt("one") == [6, 1]


@pytest.mark.skipif(sys.platform != "linux", reason="no such limit elsewhere")
@pytest.mark.parametrize(
  "template",
  [
    "{{ 'x' * 10**11 }}",
    "{{ 'x' * 2 * 10**8 }}",
    "{% set ns = namespace(x='x') %}{% for i in range(40) %}"
    "{% set ns.x = ns.x + ns.x %}{% endfor %}{{ ns.x }}",
  ],
)
def test_a_template_that_fills_the_memory_is_rejected(small, template):
  before = resource.getrlimit(resource.RLIMIT_AS)
  tokenizer = PretrainedTokenizer(small(chat_template=template))
  with pytest.raises(
    UserError, match=r"rejects the prompt: (Memory|Value)Error"
  ):
    tokenizer.prompt("one")
  assert resource.getrlimit(resource.RLIMIT_AS) == before
