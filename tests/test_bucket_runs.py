"""All modes work with a run, a model, adapters and data in a bucket."""

import json
import os
import re
import resource

import fsspec
import pytest

from dppo_jax import main
from dppo_jax.analysis import compare
from dppo_jax.errors import Unreachable, UserError
from dppo_jax.files import bucket
from tests.helpers import commands, proxy, servers

pytestmark = pytest.mark.slow

OPTIONS = {
  "steps": 1,
  "model.shape.layers": 1,
  "model.shape.embed": 16,
  "model.shape.mlp": 32,
  "model.shape.head_dim": 8,
  "data.train": "s3://bucket/train.jsonl",
  "data.prompts_per_step": 4,
  "data.eval_limit": 2,
  "rollout.max_tokens": 8,
  "rollout.num_slots": 2,
  "rollout.group_size": 2,
  "pack.row_length": 24,
  "pack.rows_per_micro": 2,
  "sft.steps": 0,
  "lora.rank": 2,
  "mesh.data": 1,
}

# Files of a run in a bucket, and the error if one is damaged.
DAMAGED = {
  "config.json": r"cannot read gs://bucket/run/config\.json",
  "metrics.jsonl": r"gs://bucket/run/metrics\.jsonl, line 1, is damaged",
}


@pytest.fixture
def machine(monkeypatch, tmp_path):
  """Returns a function that goes to a machine with an empty cache."""
  servers.skip_without("gs")
  servers.skip_without("s3")
  port = servers.free_port()
  with (
    servers.running("gs", port),
    proxy.running(port) as gate,
    servers.running("s3") as s3,
  ):
    gs = servers.environment("gs", gate.server_port)
    for name, value in (gs | s3).items():
      monkeypatch.setenv(name, value)
    for kind in ("gs", "s3"):
      fsspec.get_filesystem_class(kind).clear_instance_cache()

    def go(name: str, *, is_read_only: bool = False) -> None:
      gate.choose = lambda method, *unused: (
        "403" * (is_read_only and method != "GET")
      )
      monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / name))
      monkeypatch.setattr(bucket, "_urls", {})

    yield go


def _run(*words: str, **options) -> None:
  """Runs a command, again if its server fails, as a scheduler does."""
  options = [f"--config.{k}={v}" for k, v in options.items()]
  argv = ["main", *words, *options]
  try:
    main.main(argv)
  except Unreachable:
    main.main(argv)


def _names(kind: str) -> set[str]:
  files = fsspec.filesystem(kind).find("bucket")
  return {x.removeprefix("bucket/") for x in files}


def test_modes_on_other_machines(machine, capsys):
  """A run in gs://; data, models and exports in s3:// too."""
  rows = [{"problem": f"{x}+1=", "answer": x + 1} for x in range(8)]
  text = "".join(json.dumps(row) + "\n" for row in rows)
  machine("first")
  fsspec.filesystem("s3").pipe("bucket/train.jsonl", text.encode())
  file = f"--config={commands.ROOT}/configs/arithmetic.py:dppo"
  place = "--workdir=gs://bucket/run"
  _run(file, place, **OPTIONS)
  run = {x.removeprefix("run/") for x in _names("gs")}
  assert run >= {"metrics.jsonl", "samples.jsonl", "log.txt", "config.json"}
  assert run >= {"report.md", "report.png"}
  assert any(x.startswith("events/") for x in run)

  machine("second")
  for number in ("", ".1"):
    _run("--mode=evaluate", place, "--step=best")
    assert any(
      re.match(rf"run/evaluation/step-\d+{number}/", x) for x in _names("gs")
    )
  _run("--mode=export", place, "--to=s3://bucket/model", "--step=best")
  card = fsspec.filesystem("s3").cat("bucket/model/README.md").decode()
  assert "No results" not in card
  adapter = "gs://bucket/adapter"
  _run("--mode=export", place, f"--to={adapter}", "--format=adapter")
  assert {"model/model.safetensors", "model/README.md"} <= _names("s3")
  with pytest.raises(UserError, match="s3://bucket/model is not an empty dire"):
    _run("--mode=export", place, "--to=s3://bucket/model")

  machine("reader", is_read_only=True)
  _run(place)
  assert "already done: 1 of 1 steps; report: gs://" in capsys.readouterr().out
  with pytest.raises(UserError, match=r"gs://.* cannot be .* has the files$"):
    _run("--mode=evaluate", place)
  assert re.search(r"results: gs://bucket/run/eval", capsys.readouterr().out)
  with pytest.raises(UserError, match=r"gs://bucket/run cannot be read or wr"):
    _run(place, steps=2)

  # A run that has more steps to train keeps its lease.
  server, lease = fsspec.filesystem("gs"), "bucket/run/lease.json"
  before = server.cat(lease)
  machine("fourth")
  with pytest.raises(UserError, match="a run with another config"):
    _run(place, steps=2, **{"optimizer.learning_rate": 1.0})
  server.rm_file("bucket/run/report.md")
  _run(place)
  assert server.cat(lease) == before
  assert server.exists("bucket/run/report.md")

  machine("damaged")
  contents = {x: server.cat(f"bucket/run/{x}") for x in DAMAGED}
  for name, message in DAMAGED.items():
    bucket._urls.clear()
    server.pipe(f"bucket/run/{name}", b"{" + contents[name][:40] + b"\n")
    with pytest.raises(UserError, match=message):
      _run(place, steps=2)
    server.pipe(f"bucket/run/{name}", contents[name])
  resource.setrlimit(resource.RLIMIT_FSIZE, (4_000, resource.RLIM_INFINITY))
  try:
    with pytest.raises((UserError, OSError), match=r"File too large"):
      _run("--mode=export", place, "--to=gs://bucket/full")
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, 2 * (resource.RLIM_INFINITY,))
  assert not any(x.startswith("full") for x in _names("gs"))

  machine("third")
  compare.main(["gs://bucket/run"])
  assert "baseline" in capsys.readouterr().out
  options = {x: OPTIONS[x] for x in ("rollout.max_tokens", "lora.rank")}
  options |= {"model.path": "s3://bucket/model", "lora.adapter": adapter}
  _run("--mode=sample", "--prompt=1+1=", **options)
  assert f"s3://bucket/model, with the adapter {adapter}" in " ".join(
    capsys.readouterr().out.split()
  )
  with pytest.raises(UserError, match=r"model\.path: there is nothing at s3:"):
    _run("--mode=sample", "--prompt=1=", **{"model.path": "s3://bucket/none"})
  with pytest.raises(UserError, match=r"s3://bucket/run: a run can be in a lo"):
    _run(file, "--workdir=s3://bucket/run", **OPTIONS)
  _run(place, steps=2)
  assert "run/checkpoints/2/commit_success.txt" in _names("gs")
  other = f"--workdir={os.environ['XDG_CACHE_HOME']}/other"
  options = OPTIONS | {"sft.from_run": "gs://bucket/run@2"}
  with pytest.raises(UserError, match="from_run: gs://bucket/run has adapters"):
    _run(file, other, **options)
