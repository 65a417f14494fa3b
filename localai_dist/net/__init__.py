"""
The first Twisted layer: sessions over WebSockets, streams as ordinary transports, streamed HTTP requests.

Read in this order: ``errors``, ``config``, ``carrier`` (what a session needs of its connection), ``feed`` (a
transport's producer), ``stream`` (one stream as a transport), ``session`` (drives ``mux.session``; keepalive),
``handshake`` (opening frames), ``endpoints``, ``splice`` (joins two transports), ``sockets``, ``websocket_carrier`` and
``websocket`` (dial and accept), ``answers``, ``body`` and ``request`` (twisted.web with streamed bodies, bounded, and
JSON errors).

::

    application ◀─ITransport─▶ MuxStream ◀─▶ MuxSession ◀─Carrier─▶ WebSocket ◀─▶ TCP
                                                │
                                           mux.Session (pure)
"""
