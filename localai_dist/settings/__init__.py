"""
Every option of the three daemons, once: its flag, environment variable, YAML key, default, unit and help. Pure.

Read in this order: ``kinds`` (how one value is read), ``option`` (one row, and how a settings class is a table of
rows), ``accepted`` (old names that are taken and ignored), ``rows`` (those of several tables), ``frontend``,
``worker``, ``agent`` (the three tables), ``resolve`` (flags over environment over YAML), ``proxies`` (the machine's own
variables, which are no options), ``reference`` (writes docs/reference/options.md)::

    flags ──┐
    environ ┼─▶ resolve(FrontendSettings, …) ─▶ Resolved(settings: frozen, warnings)
    YAML ───┘        ▲
                     └ options_of(FrontendSettings): the rows, read off the dataclass fields

A field's name is its environment variable without ``LOCALAI_`` in lower case; nothing is written twice.
"""
