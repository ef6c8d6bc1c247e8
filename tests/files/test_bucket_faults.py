"""Faults of the connection to a bucket lose nothing."""

import os
import subprocess
import sys
import time

import pytest

from dppo_jax.errors import Unreachable
from dppo_jax.files import bucket
from tests.helpers import proxy as proxies
from tests.helpers.bucketed import check, go, train

pytestmark = pytest.mark.slow


def _at(fault: str, method: str, part: str, times: int):
  """Disturbs the first requests with that method and part of a path."""
  left = [times]

  def choose(method_, path, number):
    is_chosen = method in ("", method_) and part in path and left[0] > 0
    left[0] -= is_chosen
    return fault * is_chosen

  return choose


PLACES = (
  ("POST", "w%2F0.0", 1),  # an array
  ("POST", "", 6),  # the first writes
  ("GET", "w%2F", 2),
  ("GET", "o?", 3),  # listings
  ("", "checkpoints", 4),
)


@pytest.mark.parametrize(
  "fault, place", list(zip(proxies.FAULTS, PLACES, strict=True))
)
def test_fault_of_the_connection_loses_nothing(gs, url, fault, place):
  """Either the run continues, or it ends in one line and can be resumed."""
  train(bucket.workdir(url), 0, 2)
  gs.choose = _at(fault, *place)
  try:
    train(go(url), 4)
    is_ended = False
  except Unreachable:
    is_ended = True
  assert gs.disturbed
  gs.choose = lambda *unused: ""
  check(url, 0, 2 if is_ended else 4)
  train(go(url), 4) if is_ended else None
  check(url, 0, 4)


def test_one_request_in_four_that_fails_once_loses_nothing(gs, url):
  # A lost answer has a test of its own: the server has then ended the upload,
  # of which a library asks for the rest until the time limit.
  turns = ("503", "", "", "", "cut", "", "", "", "half", "", "", "")
  seen: set[tuple[str, str]] = set()

  def choose(method, path, number):
    is_first = (method, path) not in seen
    seen.add((method, path))
    return turns[len(seen) % len(turns)] if is_first else ""

  train(bucket.workdir(url), 0)
  gs.choose = choose
  try:
    train(go(url), 2)
  except Unreachable:
    gs.choose = lambda *unused: ""
    train(go(url), 2)
  gs.choose = lambda *unused: ""
  check(url, 0, 2)


_HANG = """
import pathlib, sys
from dppo_jax import main
from dppo_jax.files import bucket, storage

storage.SECONDS = 3
main.main = lambda argv: bucket.workdir(argv[1])
main.run()
"""


def test_server_that_never_answers_ends_the_command(gs, url):
  gs.choose = lambda *unused: "hang"
  start = time.monotonic()
  done = subprocess.run(
    [sys.executable, "-c", _HANG, url],
    capture_output=True,
    check=False,
    text=True,
  )
  assert done.returncode == os.EX_TEMPFAIL
  line = f"error: {url} did not answer within 3 s; re-run the command\n"
  assert done.stderr.endswith(line)
  assert time.monotonic() - start < 60
