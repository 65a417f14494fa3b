"""
What travels inside streams, as values: no Twisted, no clock, no randomness (docs/wire/).

Read in this order:

- ``preamble``     the first bytes of a stream: what it is for, over the tunnel and over a peer link
- ``credentials``  header names, bearer parsing, digests and constant-time comparison
- ``releases``     which releases may speak with each other
- ``verbs``        control verbs of a worker: requests and answers <-> JSON
- ``keys``         staging keys: build, parse, refuse
- ``files``        resume offsets and headers of the file protocol

Drawing of one relayed stream's opening (each box is one length-prefixed frame)::

    frontend A                 frontend B (owner)              worker
        │ ── "node-7 4200 i" ─────▶ │                            │
        │ ◀──────── "relay-ok" ──── │      opens a stream ─────▶ │
        │ ── "grpc 127.0.0.1:20001" ───────────────────────────▶ │
        │ ◀──────────────────────────────────────────── "ok" ─── │
        │ ◀═════════════ gRPC bytes, spliced at B ═════════════▶ │
"""
