"""A proxy before a storage server, which disturbs chosen requests."""

from collections.abc import Callable, Iterator
import contextlib
import functools
import http.client
import http.server
import threading
import time

from tests.helpers import servers

# What a proxy may do with a request.
FAULTS = (
  "503",  # answers so, without the server
  "cut",  # closes the connection, before the server has seen the request
  "lost",  # closes the connection, after the server has answered
  "half",  # closes the connection in the middle of the answer
  "delay",  # answers late
)
# `(method, path, number of the request) -> fault or ""`.
Chooser = Callable[[str, str, int], str]


@functools.cache
def own_port() -> int:
  """Returns the port of all proxies of this process.

  TensorStore reads the server's URL once in a process.
  """
  return servers.free_port()


class Proxy(http.server.ThreadingHTTPServer):
  """Forwards requests to a server on localhost."""

  daemon_threads = True
  request_queue_size = 64

  def __init__(self, port: int):
    super().__init__(("localhost", own_port()), _Handler)
    self.upstream, self.lock, self.count = port, threading.Lock(), 0
    self.choose: Chooser = lambda method, path, number: ""
    self.disturbed: list[tuple[str, str, str]] = []

  def handle_error(self, *unused) -> None:
    """Ignores clients that have closed their connection."""


class _Handler(http.server.BaseHTTPRequestHandler):
  server: Proxy

  def _forward(self) -> None:
    size = int(self.headers.get("Content-Length") or 0)
    body = self.rfile.read(size)
    with self.server.lock:
      self.server.count += 1
      fault = self.server.choose(self.command, self.path, self.server.count)
    if fault:
      self.server.disturbed.append((fault, self.command, self.path))
    if fault == "hang":
      time.sleep(600)
    if fault == "delay":
      time.sleep(0.5)
    if fault == "cut":
      self.connection.close()
      return
    if fault.isdigit():
      self.send_error(int(fault))
      return
    upstream = http.client.HTTPConnection("localhost", self.server.upstream)
    upstream.request(self.command, self.path, body, dict(self.headers))
    answer = upstream.getresponse()
    content = answer.read()
    upstream.close()
    if fault == "lost":
      self.connection.close()
      return
    self.send_response_only(answer.status)
    for name, value in answer.getheaders():
      if name.lower() not in ("content-length", "transfer-encoding"):
        self.send_header(
          name,
          value.replace(
            str(self.server.upstream), str(self.server.server_port)
          ),
        )
    self.send_header("Content-Length", str(len(content)))
    self.end_headers()
    self.wfile.write(
      content[: len(content) // 2] if fault == "half" else content
    )
    if fault == "half":
      self.connection.close()

  do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = do_PATCH = _forward

  def log_message(self, *unused) -> None:
    pass


@contextlib.contextmanager
def running(port: int) -> Iterator[Proxy]:
  """Starts a proxy before the server at a port."""
  with Proxy(port) as proxy:
    thread = threading.Thread(target=proxy.serve_forever, daemon=True)
    thread.start()
    try:
      yield proxy
    finally:
      proxy.shutdown()
      thread.join()
