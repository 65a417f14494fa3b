"""Where the object store is, who we are there, and what our objects are called. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from urllib.parse import quote, urlsplit

from localai_dist.errors import UserMistake
from localai_dist.units import MiB
from localai_dist.urls import HTTP_SCHEMES, InvalidUrl, parse_url

PREFIX = "localai-dist/sha256/"

PART_BYTES = 64 * MiB
"""Bytes of one part of an upload, as long as ``MAX_PARTS`` of them are enough. S3 wants 5 MiB at least."""

MAX_PARTS = 10_000
"""Parts of one upload. Source: the S3 API."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """
    A bucket and our credentials; without a key nothing is signed.

    Attributes:
        url: of the store, ``http(s)://host[:port]``, no trailing slash.
        name: the bucket's; it is part of the path, never of the host.
    """

    url: str
    name: str
    region: str
    access_key: str = ""
    secret_key: str = field(default="", repr=False)

    @property
    def host(self) -> str:
        """The ``Host`` header."""
        return urlsplit(self.url).netloc

    def path(self, key: str) -> str:
        """The absolute path of an object, quoted as the signature wants it."""
        return f"{urlsplit(self.url).path}/{quote(self.name, safe='')}/{quote(key, safe='/-_.~')}"


def make_bucket(url: str, name: str, region: str, access_key: str, secret_key: str) -> Bucket | None:
    """
    The bucket that the settings name; None without a URL.

    Raises:
        UserMistake: one sentence, naming the option and the remedy.
    """
    if not url:
        return None
    trouble = _trouble_with(url)
    if trouble:
        text = f"LOCALAI_STORAGE_URL is no object store's address, {trouble}"
        raise UserMistake(f"{text}: want https://host[:port], keys apart")
    if bool(access_key) != bool(secret_key):
        text = "one of LOCALAI_STORAGE_ACCESS_KEY and LOCALAI_STORAGE_SECRET_KEY is missing"
        raise UserMistake(f"{text}: set both, or none for a store that is open")
    if not name or "/" in name:
        raise UserMistake("LOCALAI_STORAGE_BUCKET is no bucket's name: want one without /")
    return Bucket(url.rstrip("/"), name, region, access_key, secret_key)


def _trouble_with(url: str) -> str:
    """Why ``url`` is no store's address; nothing if it is one."""
    try:
        store = parse_url(url, HTTP_SCHEMES)
    except InvalidUrl as error:
        return str(error)
    return "there is a user or a query in it" if store.query or "@" in store.authority else ""


def object_key(sha256: str) -> str:
    """
    The object that holds the bytes with this hash.

    Named by content, so that "it is there" can only mean "these very bytes are", and equal files are stored once.
    """
    return PREFIX + sha256


def part_size(total: int) -> int:
    """Bytes of each part but the last, for an object of ``total`` bytes."""
    return max(PART_BYTES, -(-total // MAX_PARTS))
