"""
yamux without I/O: bytes in, events out; the shell around it is ``net/``.

Read in this order: ``classes`` (control, inference, bulk), ``frame`` (the header), ``errors`` (whose fault),
``window`` (credit), ``stream`` (one stream's table and queues), ``pacing`` (delay cap, transport limit), ``sender``
(whose bytes go next), ``events``, ``limits`` (bounds), ``receiver`` and ``session`` (one end of a session).

::

    received bytes ─▶ Receiver.receive ─▶ [events] ─▶ shell ─▶ application
                          │ credit, ACK, RST                     │ write, finish, consumed
                          ▼                                      ▼
                       Sender.control ─────┐              Stream.queue
                                           ▼                     │ pulled when credit, delay cap
                 carrier message ◀── Sender.batch ◀──────────────┘ and transport allow

The wire format is ``docs/wire/mux.md``.
"""
