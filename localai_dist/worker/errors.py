"""
What can go wrong on a worker::

    WorkerError
    ├── EscapesRoot        a path that would leave its folder
    ├── PortsExhausted     no port of the range could be given
    ├── InstallFailed      a backend could not be installed
    ├── StartFailed        a backend did not come up
    ├── StillRunning       a process would not end
    ├── NoRoom             files of requests have all the room they may have
    ├── RequestOver        a file for a request that was released
    ├── NotWanted          work was stopped because whoever asked for it is gone
    ├── NotReached         no frontend answered
    └── RegistrationRefused  the frontend will never take this registration
"""

from __future__ import annotations

import errno

from localai_dist.errors import LocalAIDistError


def is_disk_full(error: BaseException | None) -> bool:
    """Whether a disk without room is what went wrong."""
    return isinstance(error, OSError) and error.errno == errno.ENOSPC


class WorkerError(LocalAIDistError):
    """Anything the worker raises on purpose."""


class EscapesRoot(WorkerError):
    """A path that, with its symbolic links resolved, is not inside the folder it has to be in."""


class PortsExhausted(WorkerError):
    """No port of the range could be given; the text names the range, who has the ports, and the knob."""


class InstallFailed(WorkerError):
    """A backend could not be installed; what was installed before is still there."""


class StartFailed(WorkerError):
    """A backend did not come up; the text ends with its last words."""


class StillRunning(WorkerError):
    """A process survived being told to end, SIGKILL included."""


class NoRoom(WorkerError):
    """A request's file does not fit; the text names the bound, and what is taken."""


class RequestOver(WorkerError):
    """A file came for a request whose files were released."""


class NotWanted(WorkerError):
    """Work was stopped because whoever asked for it is gone."""


class NotReached(WorkerError):
    """No frontend answered; the text names the last one tried and why."""


class RegistrationRefused(WorkerError):
    """A frontend refused this registration for good: the token or the request itself is wrong."""
