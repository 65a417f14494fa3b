"""
The node daemon: what runs on a GPU box. It opens no port to the outside; everything arrives as a stream of its tunnel.

Read in this order:

- ``ports``          which loopback port a backend gets (pure), and the probe that binds it
- ``logs``           the last lines of each backend (pure)
- ``lifecycle``      states of one backend process (pure)
- ``environment``    what of our environment a backend may see (pure)
- ``gallery``        index entries of installable backends (pure)
- ``containment``    paths that must stay inside a folder, both ends resolved
- ``guard``          the tiny program between us and a backend: our death is its death
- ``process``        one backend process as a child
- ``gpus``           graphics cards, as drivers tell of them
- ``capability``     which builds of backends the node can run
- ``install``        backends as directories with ``run.sh`` and ``metadata.json``
- ``sharing``        work that several callers wait for
- ``supervisor``     which processes run, by process key
- ``sums``           hashes of staged files, as the bytes arrive
- ``uploads``        staged files: one writer per key, resumable
- ``quota``          room for files of single requests (pure);  ``request_files``  those files, until they are released
- ``object_cache``   what came from an object store, bounded;  ``fetch``  one file on its way from it
- ``object_files``   the verbs of the object store
- ``sweeper``        unfinished and left-over files go
- ``files``          the file protocol as HTTP resources
- ``verbs``          the control verbs and their HTTP resources
- ``server``         the HTTP server: verbs, files, logs; probes on loopback
- ``router``         a stream of the tunnel -> a backend's port, or the HTTP server in this process
- ``readings``       memory and disk, as the registration and the heartbeat tell them
- ``identity``       the node's id and token on disk
- ``frontends``      HTTP calls to whichever frontend answers
- ``registration``   register, beat, register again
- ``service``        ``WorkerServer``: all of it built and started

Drawing::

    tunnel stream ── router ──┬─ grpc :20003 ──▶ guard ─ run.sh ─ backend   (own process group, own token)
                              └─ http ─▶ server ─┬─ verbs ─▶ supervisor ─▶ ports, process, install
                                                 ├─ files ─▶ uploads ─▶ models folder
                                                 └─ logs
    registration ── POST /api/node/register, /heartbeat ──▶ any of the frontends
"""
