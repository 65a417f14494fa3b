"""
Doubles and suites for testing against this package; ``demo`` uses its cluster too.

``memory`` (transports and a carrier without sockets), ``streams`` (``check_stream``: what every stream transport must
do), ``postgres``, ``backend`` (a scriptable inference backend), ``cluster`` (real processes).
"""
