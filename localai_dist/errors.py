"""
The root of every exception this package raises.

Each folder derives its own from here; what a reader may catch::

    LocalAIDistError
    ├── UserMistake              the operator's input; shown as one line, without a traceback
    │   ├── InvalidName          a name that can't be one (ids.py)
    │   └── InvalidQuantity      a duration, size or percentage that can't be read (units.py)
    ├── reach.Unreached          a node could not be reached; carries the outcome
    ├── mux.errors.MuxError      yamux: LocalProtocolError, RemoteProtocolError, SessionDead ...
    ├── net.errors.NetError      dial refused, handshake late, stream closed early
    ├── store.errors.StoreError  database unreachable, too slow, newer schema, fenced out
    ├── grpcclient.RpcError      a gRPC status that is not OK
    ├── staging / loads errors   a copy stalled, a load failed
    └── worker errors            containment, ports exhausted, process would not end

Each has two texts: ``str(error)`` for operators and logs, and ``told`` for whoever merely uses the API.
"""

import re

_WITHHELD = "(address)"

_URL = re.compile(r"\b[a-z][a-z0-9+.-]{0,30}://[^\s'\"),;]+", re.IGNORECASE)
_ADDRESS = re.compile(
    r"\[(?=[0-9a-f:]*::|(?:[0-9a-f]+:){7})[0-9a-f:.]+(?:%[\w.-]+)?\](?::\d+)?"  # [::1]:80
    r"|(?<![\w:.])(?=[a-f:.]*\d)(?=[0-9a-f:]*::|(?:[0-9a-f]+:){7})[0-9a-f:.]*[0-9a-f]\b(?:%[\w.-]+)?"  # fe80::1%eth0
    r"|\b\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?\b"  # 10.0.0.7, 10.0.0.7:80
    r"|(?<![\w.-])(?:localhost|[\w-]+(?:\.[\w-]+)+):\d{2,5}\b"  # box.example:80
    r"|(?<![\w-])[^\W\d_][\w-]*:\d{4,5}\b",  # box:8080
    re.IGNORECASE,
)
_PATH = re.compile(
    r"(?<=')/[^'\n]+(?=')|(?<=\")/[^\"\n]+(?=\")"  # in quotes there may be spaces in it
    r"|(?<![\w./])(?:/[^/\s'\"():;,]+)+/?"
    r"|(?<!\w)[a-z]:(?:\\+[^\\\s'\"():;,]+)+",  # C:\\models\\x.gguf
    re.IGNORECASE,
)


def without_coordinates(text: str) -> str:
    """``text`` without addresses and URLs, and with the last name only of each absolute path."""
    text = _ADDRESS.sub(_WITHHELD, _URL.sub(_WITHHELD, text))
    return _PATH.sub(lambda found: re.split(r"[/\\]", found.group().rstrip("/"))[-1], text)


class LocalAIDistError(Exception):
    """Anything this package raises on purpose."""

    @property
    def told(self) -> str:
        """What a client may be told: its text without addresses and folders, unless its kind knows better."""
        return without_coordinates(str(self))


class UserMistake(LocalAIDistError):
    """Input of an operator or a client that can't be used; its text says what would be right."""

    @property
    def told(self) -> str:
        """All of it: nothing is in it but the caller's own input and what would be right."""
        return str(self)


class InvalidName(UserMistake):
    """A name that can't be one."""


class InvalidQuantity(UserMistake):
    """A duration, size or percentage that can't be read."""
