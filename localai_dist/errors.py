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
"""


class LocalAIDistError(Exception):
    """Anything this package raises on purpose."""


class UserMistake(LocalAIDistError):
    """Input of an operator or a client that can't be used; its text says what would be right."""


class InvalidName(UserMistake):
    """A name that can't be one."""


class InvalidQuantity(UserMistake):
    """A duration, size or percentage that can't be read."""
