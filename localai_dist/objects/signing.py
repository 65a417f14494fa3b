"""
AWS Signature Version 4, for what we ask of an object store. Pure: the time comes in as a value.

Bodies are not part of the signature (``UNSIGNED-PAYLOAD``): every file's own hash is checked on the worker.

Source: https://docs.aws.amazon.com/AmazonS3/latest/API/sig-v4-header-based-auth.html
(a test compares with botocore's signer).
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from datetime import datetime
from urllib.parse import quote

from localai_dist.objects.bucket import Bucket

_ALGORITHM = "AWS4-HMAC-SHA256"
_PAYLOAD = "UNSIGNED-PAYLOAD"


def query_string(query: Mapping[str, str]) -> str:
    """The query in the one form that is signed."""
    return "&".join(f"{quote(name, safe='-_.~')}={quote(query[name], safe='-_.~')}" for name in sorted(query))


def signed(bucket: Bucket, method: str, path: str, query: Mapping[str, str], *, at: datetime) -> dict[str, str]:
    """
    The headers to send with a request, ``Host`` among them.

    Args:
        path: quoted, as it is sent.
        at: now, UTC.
    """
    headers = {"host": bucket.host}
    if not bucket.access_key:
        return headers
    stamp = at.strftime("%Y%m%dT%H%M%SZ")
    headers |= {"x-amz-content-sha256": _PAYLOAD, "x-amz-date": stamp}
    names = ";".join(sorted(headers))
    lines = "".join(f"{name}:{headers[name]}\n" for name in sorted(headers))
    request = "\n".join([method, path, query_string(query), lines, names, _PAYLOAD])
    scope = f"{stamp[:8]}/{bucket.region}/s3/aws4_request"
    to_sign = "\n".join([_ALGORITHM, stamp, scope, hashlib.sha256(request.encode()).hexdigest()])
    signature = hmac.new(_key(bucket, stamp[:8]), to_sign.encode(), hashlib.sha256).hexdigest()
    credential = f"{bucket.access_key}/{scope}"
    headers["authorization"] = f"{_ALGORITHM} Credential={credential}, SignedHeaders={names}, Signature={signature}"
    return headers


def _key(bucket: Bucket, day: str) -> bytes:
    key = f"AWS4{bucket.secret_key}".encode()
    for word in (day, bucket.region, "s3", "aws4_request"):
        key = hmac.new(key, word.encode(), hashlib.sha256).digest()
    return key
