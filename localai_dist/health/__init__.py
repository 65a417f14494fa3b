"""
Is a node fit for work? Judged from its heartbeat and its tunnel, each on its own path.

Reading order: ``verdict.py`` (pure: status and presence -> what to do), ``departure.py`` (the one announcement that a
route is gone), ``monitor.py`` (the tick)::

    heartbeat silent for 60 s ──────────────▶ offline      (its rows stay; nobody knows what it still runs)
    tunnel departed (reach.may_demote) ─────▶ unhealthy,   announced once (a loss inside the grace, or a node that never
    unhealthy, beating, tunnel connected ───▶ healthy       dialled, changes nothing)

A pass that could not read the registry changes nothing.
"""
