"""
The backend ``llama-cpp``: llama.cpp, from the xllamacpp wheel, behind the gRPC contract.

Reading order: ``asked.py`` (contract -> what the engine is asked, pure), ``replies.py`` (what the engine says ->
contract, pure), ``engine.py`` (the wheel), ``flow.py`` (chunks from an engine thread to the event loop, bounded),
``service.py`` (the calls), ``guard.py`` (ends with its parent), ``__main__.py`` (the program)::

    gRPC ──▶ token check ──▶ service ──▶ asked ──▶ engine thread ──▶ flow ──▶ replies ──▶ gRPC
                                 cancelled call ──▶ flow.stop ──▶ the engine's callback says stop ──▶ slot free

One asyncio loop serves all calls, so Health answers while every slot is busy.
"""
