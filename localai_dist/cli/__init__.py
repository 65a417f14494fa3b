"""
The command lines: three daemons for twistd, and the operator's ``localai-dist``.

Read in this order: ``options`` (a settings table as twistd options), ``start`` (what is checked before the reactor
runs), ``frontend``, ``worker``, ``agent``, ``operator/``::

    twistd localai-frontend ─▶ Options ─▶ makeService ─▶ prepared(): flags > environment > YAML
                                             │            database migrated, address free: one clear line or
                                             ▼            it starts
                                          roles.frontend.make(settings, reactor) ─▶ IService

Only this folder imports the reactor. A mistake ends as ``SystemExit("one line")`` while twistd is still in the
foreground: exit code 1, also when it would daemonise.
"""
