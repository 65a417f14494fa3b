"""
Doubles and suites for testing against this package; ``demo`` uses its cluster too.

``memory``, ``sessions`` and ``links`` (transports and mux sessions without sockets; slow and long links), ``streams``
(``check_stream``: what every stream transport must do), ``postgres``, ``backend`` (a scriptable inference backend),
``cluster`` (real processes).
"""
