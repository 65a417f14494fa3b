"""
Broadcast between frontends, on PostgreSQL's LISTEN/NOTIFY: at most once, to everybody, the sender included.

A message is a hint. Whoever needs certainty reads the database, and reads it again when told that something may have
been missed.

Read in this order:

- ``errors``        what can go wrong
- ``envelope``      a message as the text of a notification; what fits into one; subjects and filters (pure)
- ``publisher``     sends: inline, or spilled into ``bus_messages``
- ``resolver``      notifications in their order, each with its payload
- ``subscription``  one subscriber's bounded queue
- ``subscriber``    channels, filters, and word of what was missed
- ``service``       the bus of one frontend: started, stopped, swept

::

    publish ─▶ encode ── < 8000 bytes ──────────▶ NOTIFY localai_<root> ─▶ Listener ─▶ Resolver ─▶ Subscription ─▶ you
                  └─ else: bus_messages + NOTIFY ─┘                                     │ ▲          (256 each)
                                                                  (1024 in order)       └─┘ reads bus_messages

Wire format: docs/wire/bus.md.
"""
