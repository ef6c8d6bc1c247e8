"""Text to ids and back: round trips, templates, stop ids, clear errors."""

import gzip
import json
import pathlib
import shutil
import subprocess
import sys

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, processors

from dppo_jax.data import arithmetic, template_probe
from dppo_jax.data.tokenizer import (
  CharacterTokenizer,
  PretrainedTokenizer,
  find_stop_ids,
)

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
    pytest.skip("the real tokenizers are not at hand")
  path = tmp_path_factory.mktemp("real") / request.param
  path.mkdir()
  for file in (REAL / request.param).iterdir():
    if file.suffix == ".gz":
      (path / file.stem).write_bytes(gzip.decompress(file.read_bytes()))
    else:
      shutil.copyfile(file, path / file.name)
  return str(path)


@pytest.fixture(scope="module")
def asked(real):
  return PretrainedTokenizer(real, "Be brief.", "Box it.")


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


def test_arithmetic_text_round_trips_and_boxed_is_one_token():
  tokenizer = CharacterTokenizer()
  for made in arithmetic.make(seed=1, count=200, max_operations=4):
    for text in (made.problem, made.solution):
      assert tokenizer.decode(tokenizer.encode(text)) == text
  assert len(tokenizer.encode(r"\boxed{12}")) == 4
  assert tokenizer.encode_prompt("1+2=") == tokenizer.encode("1+2=")


def test_characters_are_distinct_ids_that_no_special_token_has():
  tokenizer = CharacterTokenizer()
  ids = [tokenizer.encode(symbol) for symbol in tokenizer.SYMBOLS[2:]]
  assert sorted(ids) == [[i] for i in range(2, tokenizer.vocab_size)]
  assert {tokenizer.pad_id, *tokenizer.stop_ids} == {0, 1}


def test_character_decode_drops_padding_and_stop():
  tokenizer = CharacterTokenizer()
  ids = [*tokenizer.encode("7"), *tokenizer.stop_ids, tokenizer.pad_id]
  assert tokenizer.decode(ids) == "7"


@pytest.mark.parametrize("text", ["3x4=", "\\box{3}", "<eos>"])
def test_unknown_character_is_named(text):
  unknown = next(c for c in text if c in "x\\<")
  with pytest.raises(ValueError, match=r"config\.model\.path") as error:
    CharacterTokenizer().encode(text)
  assert repr(unknown) in str(error.value)


def test_real_text_round_trips(asked):
  for text in TEXTS:
    assert asked.decode(asked.encode(text)) == text
  assert asked.encode("Hello world!") == [9707, 1879, 0]


def test_real_ids_are_below_the_vocabulary_and_specials_are_dropped(asked):
  prompt = asked.encode_prompt("1+1?")
  assert max(prompt) < asked.vocab_size
  assert "<|im_start|>" not in asked.decode(prompt)
  assert asked.decode([*asked.encode("1"), 151645, 151643]) == "1"
  assert (asked.stop_ids, asked.pad_id) == ((151645,), 151643)


def test_real_chat_template(asked):
  expected = (
    "<|im_start|>system\nBe brief.<|im_end|>\n"
    "<|im_start|>user\n1+1?\nBox it.<|im_end|>\n"
    "<|im_start|>assistant\n"
  )
  assert asked.prompt("1+1?") == expected
  assert asked.encode_prompt("1+1?") == asked.encode(expected)


def test_real_template_arguments_reach_the_template(real, asked):
  args = {"enable_thinking": False}
  silent = PretrainedTokenizer(real, "Be brief.", "Box it.", args)
  thought = "<think>\n\n</think>\n\n" if "qwen3" in real else ""
  assert silent.prompt("1+1?") == asked.prompt("1+1?") + thought


def test_template_is_used_and_begins_once(small):
  path = small(chat_template=TEMPLATE)
  tokenizer = PretrainedTokenizer(path, "be", "brief", {"loud": True})
  text = "<s>system be user one\nbrief assistant LOUD"
  assert tokenizer.prompt("one") == text
  words = text.replace("<s>", "<s> ").split()
  assert tokenizer.encode_prompt("one") == tokenizer.encode(" ".join(words))
  assert tokenizer.encode_prompt("one").count(0) == 1


def test_system_message_is_absent_where_empty(small):
  tokenizer = PretrainedTokenizer(small(chat_template=TEMPLATE))
  assert tokenizer.prompt("one") == "<s>user one assistant"


def test_without_template_a_prompt_is_plain_text_that_begins_once(small):
  tokenizer = PretrainedTokenizer(small(), "be", "brief")
  assert tokenizer.prompt("one") == "be\n\none\nbrief"
  assert tokenizer.template_note == "no chat template"
  prompt = tokenizer.encode_prompt("one")
  assert prompt == [0, *tokenizer.encode("be one brief")]
  assert 0 not in tokenizer.encode("one brief")


TALK = [
  {"role": "user", "content": "one"},
  {"role": "assistant", "content": "two"},
  {"role": "user", "content": "two"},
]


def test_a_conversation_goes_through_the_template_as_it_is(small):
  tokenizer = PretrainedTokenizer(small(chat_template=TEMPLATE), "be", "brief")
  assert tokenizer.prompt(TALK) == (
    "<s>system be user one assistant two user two\nbrief assistant"
  )
  assert TALK[-1]["content"] == "two"


@pytest.mark.parametrize(
  ("options", "template", "prompt", "complaint"),
  [
    ({"system": "be"}, TEMPLATE, [{"role": "system", "content": "x"}], "own"),
    ({}, None, TALK, "message of 'assistant' but .* no chat template"),
    ({}, "{{ raise_exception('no\nnot so') }}", "one", "prompt: no; .*system"),
    ({}, "{{ messages[0].missing.more }}", "one", "refuses the prompt"),
    ({"template_args": {"tools": 3}}, TEMPLATE, "one", "data.template_args"),
  ],
)
def test_a_prompt_that_cannot_be_made_ends_in_one_line(
  small, options, template, prompt, complaint
):
  config = {"chat_template": template} if template else {}
  tokenizer = PretrainedTokenizer(small(**config), **options)
  with pytest.raises(ValueError, match=complaint) as error:
    tokenizer.encode_prompt(prompt)
  assert "\n" not in str(error.value)


def test_a_chat_template_may_be_given_as_an_argument(small):
  args = {"chat_template": "brief {{ messages[0].content }}"}
  for config in ({}, {"chat_template": TEMPLATE}):
    tokenizer = PretrainedTokenizer(small(**config), template_args=args)
    assert tokenizer.template_note == ""
    assert tokenizer.prompt("one") == "brief one"


LOOP = "{% for x in range(99999) %}"


@pytest.mark.parametrize(
  ("template", "args", "complaint"),
  [
    (LOOP * 3 + "{% endfor %}" * 3, {}, "takes more than 2 s for one prompt"),
    ("{{ 'x' * 10**10 }}", {}, "takes more than 2 GiB"),
    ("{{ 'x' * 10**7 }}", {}, "makes 10,000,000 characters"),
    (TEMPLATE, {"loud": {1, 2}}, "from config.data.template_args .*set"),
    (TEMPLATE, {"loud": True}, None),
    ("{{ raise_exception('no') }}", {}, None),  # when it is used, it says so
  ],
)
def test_a_template_without_bounds_is_refused_at_the_start(
  small, monkeypatch, template, args, complaint
):
  monkeypatch.setattr(template_probe, "SECONDS", 2)
  tokenizer = PretrainedTokenizer(small(chat_template=template), "", "", args)
  if not complaint:
    return tokenizer.check_template()
  with pytest.raises(ValueError, match=complaint) as error:
    tokenizer.check_template()
  assert "\n" not in str(error.value)
  assert "config.data.template_args" in str(error.value)


@pytest.mark.parametrize("name", ["MyTokenizer", None])
def test_code_that_comes_with_a_tokenizer_is_not_run(small, tmp_path, name):
  path = pathlib.Path(small())
  file = path / "tokenizer_config.json"
  config = json.loads(file.read_text())
  config["tokenizer_class"] = name
  config["auto_map"] = {"AutoTokenizer": ["mine.MyTokenizer", None]}
  file.write_text(json.dumps({k: v for k, v in config.items() if v}))
  (path / "mine.py").write_text(
    f"open({str(tmp_path / 'ran')!r}, 'w')\n"
    "from transformers import PreTrainedTokenizerFast as MyTokenizer\n"
  )
  with pytest.raises(ValueError, match=r"code of its own .* never run"):
    PretrainedTokenizer(str(path))
  assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
  ("name", "text", "complaint"),
  [
    ("tokenizer.json", '{"version": ', "tokenizer.json is damaged, it is no"),
    ("tokenizer.json", "{}", "config.model.path .* cannot be read: "),
    ("tokenizer_config.json", "no", "tokenizer_config.json is damaged"),
  ],
)
def test_a_damaged_tokenizer_is_named(small, name, text, complaint):
  path = pathlib.Path(small())
  (path / name).write_text(text)
  with pytest.raises(ValueError, match=complaint) as error:
    PretrainedTokenizer(str(path))
  assert str(path) in str(error.value) and "fetch" in str(error.value)
  assert "\n" not in str(error.value)


@pytest.mark.parametrize(
  ("generation", "model", "eos", "expected"),
  [
    ({"eos_token_id": 7}, {"eos_token_id": 8}, 9, (7,)),
    ({"eos_token_id": [7, 6, 7]}, {"eos_token_id": 8}, 9, (7, 6)),
    ({"eos_token_id": 0}, None, 9, (0,)),
    ({}, {"eos_token_id": [8, 5]}, 9, (8, 5, 9)),
    ({"eos_token_id": None}, {"eos_token_id": 9}, 9, (9,)),
    (None, {"eos_token_id": 8}, None, (8,)),
    (None, None, 0, (0,)),
  ],
)
def test_stop_ids(tmp_path, generation, model, eos, expected):
  for name, config in (("generation_config", generation), ("config", model)):
    if config is not None:
      (tmp_path / f"{name}.json").write_text(json.dumps(config))
  assert find_stop_ids(str(tmp_path), eos) == expected


def test_checkpoint_without_any_stop_id_names_the_knob(small):
  tokenizer = PretrainedTokenizer(small(eos_token=None))
  with pytest.raises(ValueError, match=r"config\.rollout\.stop_ids"):
    _ = tokenizer.stop_ids


@pytest.mark.parametrize(
  ("present", "missing"),
  [
    ((), "vocab.json, merges.txt, tokenizer_config.json are missing"),
    (("vocab.json", "tokenizer_config.json"), "which merges.txt is missing"),
    (("tokenizer.json.gz",), "it needs tokenizer.json, or"),
  ],
)
def test_missing_files_are_named_with_their_directory(
  tmp_path, present, missing
):
  for name in present:
    (tmp_path / name).write_text("{}")
  with pytest.raises(ValueError, match=missing) as error:
    PretrainedTokenizer(str(tmp_path))
  assert str(tmp_path) in str(error.value)


def test_reading_a_tokenizer_prints_nothing(small):
  code = (
    "import sys; from dppo_jax.data.tokenizer import PretrainedTokenizer;"
    "assert 'transformers' not in sys.modules;"
    f"PretrainedTokenizer({small()!r})"
  )
  done = subprocess.run(
    [sys.executable, "-W", "error", "-c", code],
    capture_output=True,
    check=True,
    text=True,
    cwd=pathlib.Path(__file__).parents[2],
  )
  assert (done.stdout, done.stderr) == ("", "")
