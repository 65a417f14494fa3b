"""
A node's tunnel: the worker dials out, a frontend admits it, claims its ownership and holds it.

Read in this order:

- ``held``      the tunnels this frontend holds; claim before use, release by attachment
- ``identities`` frontend: ends tunnels whose identity changed hands
- ``acceptor``  frontend: ``GET /api/cluster/connect``, every refusal before the upgrade
- ``urls``      worker: which frontend to dial next (pure)
- ``link``      worker: the lifecycle of its tunnel as a machine
- ``dialer``    worker: the service around that machine

The tunnel knows no SQL: what it needs of the registry comes in as an object (``held.OwnershipLike``,
``acceptor.NodeDoor``)::

      worker                                      frontend
    TunnelClient ──GET /api/cluster/connect──▶ ConnectResource ── authenticate(node, token) ─▶ registry
       Link                                        │ 101
    (yamux client)  ◀────── one session ──────▶ (yamux server)
                                                   │ attach: claim, then store
                                               HeldTunnels ── get(node) ─▶ relay.Forwarder
"""
