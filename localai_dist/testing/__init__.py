"""
Doubles and suites for testing against this package; ``demo`` uses its cluster too.

``memory`` and ``sessions`` (transports and mux sessions without sockets), ``streams`` (``check_stream``: what every
stream transport must do), ``postgres``, ``backend`` (a scriptable inference backend), ``cluster`` (real processes).
"""
