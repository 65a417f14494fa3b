"""
Distributed inference for LocalAI-style backends: many GPU boxes behind one OpenAI-compatible address.

Folders are components and layers are import rules (see ``setup.cfg``, ``[importlinter]``); read upwards::

    ids units errors          words
    reach backoff             decisions about words
    mux wire catalog settings rpc      sans-IO protocols and values
    net store                 the first Twisted layer; PostgreSQL mechanics
    tunnel registry bus claims accounts
    grpcclient, relay         one call to a backend; the way to a node
    scheduler staging health, loads agents, serving
    httpapi worker            what the two daemons answer
    roles cli                 one object graph per daemon; the command lines
"""

__version__ = "0.1.0"
