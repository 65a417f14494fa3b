"""
Reaching a node from any frontend: over the tunnel held here, or relayed by the frontend that holds it.

Read in this order:

- ``routes``    from what the registry knows to a decision: local, via a peer, or an outcome (pure)
- ``deadline``  the caller's deadline around a coroutine; tested before anything else
- ``peers``     links to other frontends: one session each, one dial for many opens
- ``acceptor``  ``GET /api/cluster/peer``: another frontend's link, both credentials required
- ``serve``     the owner's side of a relayed stream: one hop, never further
- ``forward``   ``Forwarder``: node -> stream, or ``reach.Unreached`` with the one outcome it was
- ``body``      bounded reading of HTTP answers
- ``http``      ``NodeHttp``: HTTP requests to a worker's own server
- ``control``   ``VerbClient``: control verbs

One request that lands on a frontend which does not hold the tunnel::

    Forwarder.open(node)
        │ held here? ──yes──▶ stream on that session ──────────────┐
        │ no                                                        ▼
        │ owner cached, else asked of PostgreSQL            "grpc …" / "http …"
        ▼                                                           ▲
    PeerPool ── "node ms class" ──▶ RelayService (owner) ── splice ─┘
"""
