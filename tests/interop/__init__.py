"""
Our yamux with other people's: ``node/`` has a peer with ``@libp2p/yamux``, ``go/`` one with hashicorp's.

``peers`` prepares them once into ``build/peers``: npm installs what the committed lock file names, ``go build`` takes
what Debian's ``golang-github-hashicorp-yamux-dev`` installed. A machine without the tool runs nothing of that peer, and
the last lines of ``make test`` say so.

A peer is one process and one TCP connection; it is told to listen (yamux server) or to dial us (yamux client). The
first byte of a stream says what it is for, whichever end opened it:

=====  ==================================================================================================
``e``  what follows comes back, until the end
``h``  what follows is counted; the number comes after the end (a half-close)
``o``  a line ``COUNT SIZE``: the peer opens so many ``e`` streams at once, each SIZE bytes, and says ``ok``
``b``  a line: the peer opens an ``h`` stream of 1 000 000 bytes, and says ``ok``; ``unsupported`` where it has none
``p``  a line: the peer pings us, and says ``ok``
``g``  a line: the peer says ``ok``, then go-away
``a``  two lines, our go-away between them: the peer says how its next open failed (Go only)
=====  ==================================================================================================
"""
