"""
Run a program that ends when its parent ends: ``python guard.py PARENT_PID PROGRAM ARGUMENTS…``.

The kernel kills a process with PR_SET_PDEATHSIG set once the *thread* that forked it is gone, so who starts this must
do so from a thread that lives as long as itself. The setting survives ``exec``, so the program keeps this pid and this
file is gone from memory. It is run by its path, with ``-I -S``, so it imports nothing but ctypes.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Tie this process to its parent and become the program."""
    parent, argv = int(sys.argv[1]), sys.argv[2:]
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise SystemExit(f"can't tie a child to its parent: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent:  # it died before the line above
        raise SystemExit(1)
    try:
        os.execvp(argv[0], argv)
    except OSError as problem:
        raise SystemExit(f"can't run {argv[0]}: {problem.strerror}") from None


if __name__ == "__main__":
    main()
