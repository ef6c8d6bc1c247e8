"""Errors of buckets: final ones, and those that a later start may not meet."""

import pytest

from dppo_jax.errors import Unreachable, UserError
from dppo_jax.files import storage


def _denied(code: int) -> Exception:
  """Returns what gcsfs raises for a status."""
  retry = pytest.importorskip("gcsfs.retry")
  content = b'{"error": {"message": "no access to it"}}'
  with pytest.raises(Exception, match="no access") as info:
    retry.validate_response(code, content, "bucket/run")
  return info.value


@pytest.mark.parametrize(
  "code, kind", [(401, UserError), (403, UserError), (503, Unreachable)]
)
def test_only_denied_access_to_a_bucket_is_final(code, kind):
  with pytest.raises(UserError, match="no access to it") as info:
    with storage.explaining_errors("gs://bucket/run"):
      raise _denied(code)
  assert type(info.value) is kind
