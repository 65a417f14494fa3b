"""Where the object store is, and signatures."""

from __future__ import annotations

from datetime import UTC, datetime

from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from twisted.trial.unittest import SynchronousTestCase

from localai_dist.errors import UserMistake
from localai_dist.objects.bucket import MAX_PARTS, PART_BYTES, Bucket, make_bucket, object_key, part_size
from localai_dist.objects.signing import query_string, signed
from localai_dist.units import GiB

AT = datetime(2030, 2, 3, 4, 5, 6, tzinfo=UTC)
BUCKET = Bucket("http://s3.example:9000", "localai", "eu-central-1", "AKIDEXAMPLE", "secret/key")


def reference(method: str, url: str) -> dict[str, str]:
    """The headers botocore's own signer makes."""
    request = AWSRequest(method, url, headers={"X-Amz-Content-SHA256": "UNSIGNED-PAYLOAD"})
    request.context["timestamp"] = AT.strftime("%Y%m%dT%H%M%SZ")
    request.context["payload_signing_enabled"] = False
    signer = S3SigV4Auth(Credentials(BUCKET.access_key, BUCKET.secret_key), "s3", BUCKET.region)
    request.headers["X-Amz-Date"] = request.context["timestamp"]
    del request.headers["X-Amz-Content-SHA256"]
    request.headers["X-Amz-Content-SHA256"] = "UNSIGNED-PAYLOAD"
    canonical = signer.canonical_request(request)
    request.headers["Authorization"] = ""
    del request.headers["Authorization"]
    signature = signer.signature(signer.string_to_sign(request, canonical), request)
    signer._inject_signature_to_request(request, signature)
    return {name.lower(): value for name, value in request.headers.items()}


class SigningTests(SynchronousTestCase):
    def test_as_the_reference_does(self) -> None:
        """Each kind of request has the signature that the store's own library would give it (LOAD-20)."""
        for method, key, query in (
            ("HEAD", object_key("a" * 64), {}),
            ("GET", "odd name/ü+&=~.bin", {}),
            ("PUT", object_key("b" * 64), {"partNumber": "17", "uploadId": "a+b/c=="}),
            ("POST", object_key("b" * 64), {"uploads": ""}),
        ):
            path = BUCKET.path(key)
            ours = signed(BUCKET, method, path, query, at=AT)
            url = BUCKET.url + path + (f"?{query_string(query)}" if query else "")
            self.assertEqual(ours["authorization"], reference(method, url)["authorization"], key)

    def test_without_keys_nothing_is_signed(self) -> None:
        """An open store is asked without a signature (LOAD-20)."""
        self.assertEqual(signed(Bucket("http://h", "b", "r"), "GET", "/b/k", {}, at=AT), {"host": "h"})

    def test_the_secret_is_not_shown(self) -> None:
        """The secret key is in no text of the bucket."""
        self.assertNotIn("secret/key", repr(BUCKET))


class BucketTests(SynchronousTestCase):
    def test_settings(self) -> None:
        """No URL is no store; a wrong one is refused in one sentence that names the option (LOAD-20)."""
        self.assertIsNone(make_bucket("", "b", "r", "", ""))
        made = make_bucket("https://s3.example/base/", "b", "r", "k", "s")
        assert made is not None
        self.assertEqual(
            (made.url, made.host, made.path("a b")), ("https://s3.example/base", "s3.example", "/base/b/a%20b")
        )
        bad = ("s3.example", "ftp://x", "http://", "http://user:pw@host", "http://h?x", "http://[::1", "http://h:0")
        for url in (*bad, "http://user:pw@h:x"):
            mistake = str(self.assertRaises(UserMistake, make_bucket, url, "b", "r", "", ""))
            self.assertIn("LOCALAI_STORAGE_URL", mistake)
            self.assertNotIn("pw", mistake)
        for keys in (("k", ""), ("", "s")):
            self.assertIn("is missing", str(self.assertRaises(UserMistake, make_bucket, "http://h", "b", "r", *keys)))
        for name in ("", "a/b"):
            self.assertIn(
                "LOCALAI_STORAGE_BUCKET",
                str(self.assertRaises(UserMistake, make_bucket, "http://h", name, "r", "", "")),
            )

    def test_parts(self) -> None:
        """Parts are 64 MiB, and larger only where ten thousand of them would not be enough (LOAD-20)."""
        self.assertEqual(part_size(600 * GiB), PART_BYTES)
        self.assertGreater(part_size(1000 * GiB), PART_BYTES)
        for total in (0, 1, PART_BYTES, 5000 * GiB + 1):
            self.assertLessEqual(-(-total // part_size(total)), MAX_PARTS)
