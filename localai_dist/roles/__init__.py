"""
The object graph of each daemon: every constructor call, and the order in which things start and stop.

- ``advertise``  the address other frontends dial: found, checked, or None
- ``frontend``   database, registry, tunnels, relay, loads, API; start, lame duck, drain
- ``worker``     registration, tunnel, backends
- ``agent``      registration, tunnel; verbs come with the agents

    cli/frontend.makeService ─▶ roles.frontend.make(settings, reactor) ─▶ IService for twistd

Nothing here decides anything about requests; a folder that needs another one's object gets it from here.
"""
