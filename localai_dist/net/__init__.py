"""
The first Twisted layer: sessions over WebSockets, streams as ordinary transports, streamed HTTP requests.

Read in this order: ``errors``, ``config``, ``carrier`` (what a session needs of its connection), ``feed`` (a
transport's producer), ``socketless`` and ``stream`` (one stream as a transport), ``opens`` (those that wait) and
``session`` (drives ``mux.session``; keepalive), ``handshake`` (opening frames), ``endpoints``, ``splice`` (joins two
transports), ``proxy`` (the way through one), ``sockets``, ``websocket_mask`` and ``websocket_frames`` (the data path),
``websocket_carrier`` and ``websocket`` (dial and accept), ``head`` (of a request), ``answers``, ``body`` and
``request`` (twisted.web with streamed bodies, bounded, and JSON errors).

::

    application ◀─ITransport─▶ MuxStream ◀─▶ MuxSession ◀─Carrier─▶ WebSocket ◀─▶ TCP
                                                │
                                           mux.Session (pure)
"""
