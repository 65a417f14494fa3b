"""
Every test of localai-dist; ``python -m tests`` runs them all and says what ran.

The folders mirror ``localai_dist``; ``db`` needs PostgreSQL (it starts its own), ``process`` starts real daemons, and
``attacks`` breaks the code on purpose. Importing this package turns what Python would only print (a coroutine never
awaited, an exception in a finaliser) into an error of the test that is running.
"""

from __future__ import annotations

import os
import sys

from hypothesis import HealthCheck, settings
from twisted.internet import defer
from twisted.logger import Logger
from twisted.python.failure import Failure

_log = Logger()


def _report(unraisable: sys.UnraisableHookArgs) -> None:
    """Log what nobody could catch, so that trial fails the running test with it."""
    error = unraisable.exc_value or unraisable.exc_type()
    _log.failure(
        "unraisable: {what} {subject!r}", Failure(error), what=unraisable.err_msg or "", subject=unraisable.object
    )


sys.unraisablehook = _report
defer.setDebugging(True)
# How long an example takes, or its making, is the machine's doing. A server's run is to say whether this change broke
# something, so it takes the same examples each time; new ones are found where somebody can look at them.
settings.register_profile(
    "localai-dist", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize="CI" in os.environ
)
settings.load_profile("localai-dist")
