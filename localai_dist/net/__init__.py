"""
The first Twisted layer: sessions over WebSockets, streams as ordinary transports, streamed HTTP requests.

Read in this order: ``errors``, ``carrier`` (what a session needs of its connection), ``stream`` (one stream as a
transport), ``session`` (drives ``mux.session``; keepalive), ``handshake`` (opening frames), ``endpoints``, ``splice``
(joins two transports), ``websocket`` (the carrier; dial and accept), ``body``, ``request`` and ``answers``
(twisted.web with streamed bodies, bounded, and JSON errors).

::

    application ◀─ITransport─▶ MuxStream ◀─▶ MuxSession ◀─Carrier─▶ WebSocket ◀─▶ TCP
                                                │
                                           mux.Session (pure)
"""
