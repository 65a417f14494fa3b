"""
PostgreSQL mechanics: connections that heal, statements by name, migrations. No domain words outside ``sql/``.

Read in this order::

    errors.py       what can go wrong, and what the driver's errors mean
    dsn.py          a database URL with our defaults in it, and without its password (pure)
    names.py        the database's host looked up in a thread
    statements.py   named SQL out of sql/*.sql
    acting.py       the closed list of what deletes, demotes or evicts (pure)
    connection.py   one connection, from open to lost; never reopened
    transaction.py  a transaction around a coroutine
    healing.py      opens a connection, and the next one when it was lost
    pool.py         a few healing connections, lent to one statement at a time
    listener.py     one healing connection that LISTENs
    schema.py       migrations/*.sql under one lock (synchronous: before the reactor runs)

    caller ── await pool.fetch(sql, params) ──▶ Pool ──lends──▶ Connection ──▶ PostgreSQL
                                                 ▲ offers            │ lost
                                            KeptConnection ◀─────────┘

Whoever awaits a statement gets rows, ``StatementFailed``, or within a bound ``StoreUnavailable``.
"""
