"""All modes work with a run, a model, adapters and data in a bucket."""

import json
import pathlib

import fsspec
import pytest

from dppo_jax import main
from dppo_jax.analysis import compare
from dppo_jax.errors import UserError
from dppo_jax.files import bucket
from tests.helpers import commands, servers

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
  "eval.prompts": 2,
  "lora.rank": 2,
  "mesh.data": 1,
}


@pytest.fixture
def machine(monkeypatch, tmp_path):
  """Returns a function that goes to a machine with an empty cache."""
  servers.skip_without("s3")
  with servers.running("s3") as variables:
    for name, value in variables.items():
      monkeypatch.setenv(name, value)
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    yield lambda name: monkeypatch.setenv(
      "XDG_CACHE_HOME", str(tmp_path / name)
    )


def _run(*words: str, **options) -> None:
  options = [f"--config.{k}={v}" for k, v in options.items()]
  main.main(["main", *words, *options])


def _names() -> set[str]:
  return {
    x.removeprefix("bucket/") for x in fsspec.filesystem("s3").find("bucket")
  }


def test_modes_on_other_machines(machine, capsys):
  machine("first")
  data = pathlib.Path(bucket.local("s3://bucket"))
  data.mkdir()
  rows = [{"problem": f"{x}+1=", "answer": x + 1} for x in range(8)]
  text = "".join(json.dumps(row) + "\n" for row in rows)
  (data / "train.jsonl").write_text(text)
  bucket.upload(data)
  file = f"--config={commands.ROOT}/configs/arithmetic.py:dppo"
  _run(file, "--workdir=s3://bucket/run", **OPTIONS)
  run = {x.partition("/")[2] for x in _names() if x.startswith("run/")}
  assert run >= {"metrics.jsonl", "samples.jsonl", "log.txt", "config.json"}
  assert run >= {"report.md", "report.png"}
  assert any(x.startswith("events/") for x in run)

  machine("second")
  place = "--workdir=s3://bucket/run"
  _run("--mode=evaluate", place, "--step=best")
  assert any("run/evaluation/step-" in name for name in _names())
  _run("--mode=export", place, "--to=s3://bucket/model")
  adapter = "s3://bucket/adapter"
  _run("--mode=export", place, f"--to={adapter}", "--format=adapter")
  assert {"model/model.safetensors", "model/README.md"} <= _names()
  with pytest.raises(UserError, match="is not an empty directory"):
    _run("--mode=export", place, "--to=s3://bucket/model")
  _run(place)
  assert "already done: 1 of 1 steps; report: s3://" in capsys.readouterr().out

  machine("third")
  compare.main(["s3://bucket/run"])
  assert "baseline" in capsys.readouterr().out
  copy = pathlib.Path(bucket.local("s3://bucket/run", names=["config.json"]))
  assert {x.name for x in copy.iterdir()} == {"config.json", "metrics.jsonl"}
  options = {x: OPTIONS[x] for x in ("rollout.max_tokens", "lora.rank")}
  options |= {"model.path": "s3://bucket/model", "lora.adapter": adapter}
  _run("--mode=sample", "--prompt=1+1=", **options)
  assert f"s3://bucket/model, with the adapter {adapter}" in " ".join(
    capsys.readouterr().out.split()
  )
  with pytest.raises(UserError, match=r"model\.path: there is nothing at s3:"):
    _run("--mode=sample", "--prompt=1=", **{"model.path": "s3://bucket/none"})
  _run(place, steps=2)
  assert "run/checkpoints/2/_CHECKPOINT_METADATA" in _names()
  capsys.readouterr()
  damaged = next(copy.glob("checkpoints/2/params/*/*/*"))
  damaged.write_bytes(bytes(damaged.stat().st_size))
  _run(place, steps=3)
  assert "damaged" not in "".join(capsys.readouterr())
