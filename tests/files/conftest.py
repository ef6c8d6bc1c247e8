"""Fixtures of buckets: a server behind a proxy."""

import os

import fsspec
import pytest

from dppo_jax.files import bucket
from tests.helpers import proxy as proxies
from tests.helpers import servers


@pytest.fixture(scope="module")
def gs():
  """A proxy before a server of `gs://bucket`, for all tests of a file."""
  servers.skip_without("gs")
  port = servers.free_port()
  with servers.running("gs", port), proxies.running(port) as proxy:
    os.environ |= servers.environment("gs", proxy.server_port)
    fsspec.get_filesystem_class("gs").clear_instance_cache()
    yield proxy
    for name in servers.environment("gs", 0):
      del os.environ[name]


@pytest.fixture
def url(gs, monkeypatch, tmp_path):
  """URL of a new run, on a machine that has nothing."""
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
  monkeypatch.setattr(bucket, "_urls", {})
  gs.choose, gs.disturbed = lambda *unused: "", []
  yield f"gs://bucket/{tmp_path.name}/run"
  gs.choose = lambda *unused: ""
