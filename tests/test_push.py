"""An export is uploaded to the hub, here a local server with its API."""

import base64
from http import server
import json
import threading

from huggingface_hub import constants
import pytest

from dppo_jax import export
from dppo_jax.errors import UserError
from dppo_jax.run.setup import setup_run
from tests.helpers import commands
from tests.test_export import SETTINGS, run_of

pytestmark = pytest.mark.slow

NAME = "me/model"


class _Hub(server.BaseHTTPRequestHandler):
  """Answers what creating a repository and a commit ask for."""

  def do_POST(self):
    length = int(self.headers["Content-Length"])
    body = self.rfile.read(length).decode()
    hub = self.server
    hub.paths.append(self.path)
    hub.tokens.add(self.headers["Authorization"])
    if self.path in hub.rejects:
      self._answer(403, {"error": "no write access"})
    elif self.path == "/api/repos/create":
      hub.created = json.loads(body)
      self._answer(200, {"url": f"{hub.address}/{NAME}"})
    elif self.path == "/api/validate-yaml":
      self._answer(200, {"warnings": [], "errors": []})
    elif self.path == f"/api/models/{NAME}/preupload/main":
      files = json.loads(body)["files"]
      modes = [
        {"path": x["path"], "uploadMode": "regular", "shouldIgnore": False}
        for x in files
      ]
      self._answer(200, {"files": modes})
    elif self.path == f"/api/models/{NAME}/commit/main":
      lines = [json.loads(x) for x in body.splitlines()]
      for line in lines:
        if line["key"] == "file":
          content = base64.b64decode(line["value"]["content"])
          hub.files[line["value"]["path"]] = content
      commit = {
        "commitOid": "0" * 40,
        "commitUrl": f"{hub.address}/{NAME}/commit/0",
      }
      self._answer(200, commit | {"hookOutput": "", "success": True})
    else:
      self._answer(404, {"error": "not expected by the test"})

  def do_GET(self):
    self._answer(404, {"error": "not expected by the test"})

  def _answer(self, status, content):
    data = json.dumps(content).encode()
    self.send_response(status)
    self.send_header("Content-Type", "application/json")
    self.send_header("Content-Length", str(len(data)))
    self.end_headers()
    self.wfile.write(data)

  def log_message(self, *args):
    pass


@pytest.fixture
def hub(monkeypatch):
  with server.ThreadingHTTPServer(("127.0.0.1", 0), _Hub) as hub:
    hub.address = f"http://127.0.0.1:{hub.server_port}"
    hub.paths, hub.tokens, hub.files, hub.rejects = [], set(), {}, set()
    monkeypatch.setattr(constants, "ENDPOINT", hub.address)
    monkeypatch.setenv("HF_TOKEN", "hf_of_a_test")
    threading.Thread(target=hub.serve_forever, daemon=True).start()
    yield hub
    hub.shutdown()


@pytest.fixture
def begun(tmp_path):
  """`(config, workdir)` of a run of the arithmetic task, at step 0."""
  params = setup_run(commands.config("arithmetic", **SETTINGS)).initial_params()
  return run_of(tmp_path / "run", params), tmp_path / "run"


def test_the_repository_gets_the_files_of_the_export(hub, begun, tmp_path):
  export.run(*begun, tmp_path / "to", push=NAME)
  assert hub.created["name"] == "model" and hub.created["organization"] == "me"
  is_private = hub.created.get("visibility") == "private"
  assert is_private or hub.created["private"]  # before huggingface-hub 2
  assert hub.tokens == {"Bearer hf_of_a_test"}
  files = {x.name: x.read_bytes() for x in (tmp_path / "to").iterdir()}
  assert "model.safetensors" in files and "README.md" in files
  assert hub.files == files


def test_a_rejected_repository_ends_before_the_export(hub, begun, tmp_path):
  hub.rejects.add("/api/repos/create")
  with pytest.raises(UserError, match=f"--push: cannot create {NAME}.*403"):
    export.run(*begun, tmp_path / "to", push=NAME)
  assert not (tmp_path / "to").exists() and not hub.files


def test_a_failed_upload_leaves_the_export(hub, begun, tmp_path):
  hub.rejects.add(f"/api/models/{NAME}/commit/main")
  with pytest.raises(UserError, match=f"`hf upload {NAME} {tmp_path}/to`"):
    export.run(*begun, tmp_path / "to", push=NAME)
  assert (tmp_path / "to/model.safetensors").exists()


def test_without_a_token_nothing_is_exported(hub, begun, tmp_path, monkeypatch):
  monkeypatch.delenv("HF_TOKEN")
  monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "absent"))
  with pytest.raises(UserError, match=r"--push needs a token.*HF_TOKEN"):
    export.run(*begun, tmp_path / "to", push=NAME)
  assert not (tmp_path / "to").exists() and not hub.paths
