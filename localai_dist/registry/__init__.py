"""
What the cluster knows: nodes, who holds their tunnels, running frontends, loaded replicas, scheduling wishes.

Read in this order (the first six are pure)::

    status.py      the status of a node: (from, trigger) -> to
    records.py     Node, Registration, Readings, Replica, SchedulingRow
    presence.py    where a node is: never dialled, connected, reconnecting, departed
    identity.py    whose name is it: what a registration may change
    labels.py      labels a node gets by itself;  budget.py  a VRAM budget in bytes
    acting.py      every statement that deletes, demotes or evicts, and its ground
    nodes.py       registration, approval, heartbeat;  node_labels.py
    ownership.py   claims with epochs, presence by one statement
    instances.py   frontends;  membership.py  their heartbeat service
    replicas.py    loaded copies;  scheduling.py  wishes

    httpapi ─▶ Nodes ─┐
    tunnel ─▶ Ownership ─┤
    loads, serving ─▶ Replicas ─┼─▶ store.Pool ─▶ store/sql/*.sql ─▶ PostgreSQL
    roles ─▶ Membership ─┘

All times are the database's; a failed query is ``StoreUnavailable`` and means that nothing is known.
"""
