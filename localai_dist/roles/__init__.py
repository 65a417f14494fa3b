"""
The object graph of each daemon: every constructor call, and the order in which things start and stop.

- ``advertise``  the address other frontends dial: found, checked, or None
- ``frontend``   database, registry, tunnels, relay, loads, API; start, lame duck, drain
- ``frontend_service``  its starting and stopping
- ``membership`` what makes a daemon a node: registration and tunnel
- ``worker``     a node with backends
- ``agent``      a node without; verbs come with the agents
- ``node_service``  the starting and stopping of both
- ``ending``     a second SIGTERM, and exit code 1

    cli/frontend.makeService ─▶ roles.frontend.make(settings, reactor) ─▶ IService for twistd

Nothing here decides anything about requests; a folder that needs another one's object gets it from here.
"""
