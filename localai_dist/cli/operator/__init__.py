"""
``localai-dist``, the operator's command: noun, then verb.

Read in this order: ``api`` (one HTTP question to a frontend, and what its refusals mean), ``show`` (tables and JSON),
``nodes``, ``models``, ``ops``, ``doctor``, ``demo`` (a whole cluster on this machine), ``main`` (the command itself,
its exit codes: 0, 1 failure, 2 usage, 4 not found)::

    localai-dist nodes ls ─▶ nodes ─▶ api ──HTTP──▶ a frontend
                               └────▶ show ─▶ stdout      errors: one line on stderr
"""
