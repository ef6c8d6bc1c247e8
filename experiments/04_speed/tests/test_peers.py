"""The comparison with other systems: its check, with none of them installed."""

import argparse
import importlib
import json

import jax
import numpy as np
import pytest
from scipy.special import log_softmax

from dppo_jax.models import hf, parameters, transformer
from dppo_jax.models.hf import families

with_ours, work = (
  importlib.import_module(f"experiments.04_speed.peers.{x}")
  for x in ("with_ours", "work")
)
forward = jax.jit(transformer.forward, static_argnums=1)


@pytest.mark.slow
def test_check_scores_every_token_of_its_sequences(tmp_path, monkeypatch):
  """Its packed rows give each sequence the log-probabilities it has alone."""
  small = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
  monkeypatch.setattr(work, "MODEL", work.MODEL | small)
  work.write(tmp_path, steps=1)
  checkpoint = str(tmp_path / "checkpoint")
  settings = {"architectures": ["Qwen3ForCausalLM"], "rms_norm_eps": 1e-6}
  model = families.from_settings(work.MODEL | settings, remat="none")
  params = parameters.init(model, jax.random.key(0))
  stop = {"eos_token_id": work.EOS}
  hf.save(checkpoint, params, model, settings=stop, generation=stop)
  work.write_tokenizer(checkpoint)
  out = tmp_path / "check.json"
  with_ours.check(
    argparse.Namespace(
      work=tmp_path, out=out, micro="1x896", steps=1, seed=0, method="grpo"
    )
  )
  checked, sequences = json.loads(out.read_text()), work.sequences(tmp_path)
  assert checked["prompt_ids"] == sequences["prompts"][:: work.GROUP]
  assert checked["norm"] > 0
  both = zip(sequences["prompts"], sequences["completions"], strict=True)
  padded = work.padded([x + y for x, y in both], work.LONGEST + work.NEW)
  tokens = np.array(padded, np.int32)
  hidden = forward(
    params,
    model,
    tokens,
    np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape),
    np.where(tokens != work.PAD, np.int32(tokens.shape[1]), 0),
  )
  logits = np.asarray(transformer.logits(params, model, hidden))
  for row in range(work.BATCH):
    prompt, completion = (sequences[x][row] for x in ("prompts", "completions"))
    start, length = len(prompt) - 1, len(completion)
    logprobs = log_softmax(logits[row, start : start + length], axis=-1)
    expected = logprobs[np.arange(length), np.array(completion)]
    actual = checked["logprobs"][row][:length]
    np.testing.assert_allclose(actual, expected, atol=1e-4)
