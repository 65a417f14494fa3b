"""
Paths that must stay inside a folder, with the symbolic links of *both* ends resolved.

Source: internals §4b (a sibling ``/models-evil`` and a link that leaves are refused; an aliased root and a missing leaf
are fine).
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from localai_dist.errors import InvalidName
from localai_dist.wire.keys import Area, StagingKey
from localai_dist.worker.errors import EscapesRoot

_FOLDER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+@-]{0,127}")


def resolve_inside(root: Path, relative: str) -> Path:
    """
    The real path of ``relative`` below ``root``; it need not exist.

    The links of every part that exists are followed; what does not exist yet is appended as it is.

    Raises:
        EscapesRoot: the result is not below (or equal to) the real ``root``.
    """
    real_root = Path(os.path.realpath(root))
    target = Path(os.path.realpath(real_root / relative))
    if target != real_root and real_root not in target.parents:
        raise EscapesRoot(f"{relative[:120]!r} leaves its folder")
    return target


def folder_name(name: str) -> str:
    """
    ``name`` if it can be one folder's name.

    Raises:
        InvalidName: empty, with a separator, or starting with a dot.
    """
    if not _FOLDER_NAME.fullmatch(name):
        raise InvalidName(f"{name[:80]!r} is not a backend's name: want letters, digits and any of . _ + @ -")
    return name


class Areas:
    """
    The folders of the staging areas.

    Args:
        models: the models folder.
        data: for keys below ``data/``; never the folder with the node's identity.
        staging: for everything else.
    """

    def __init__(self, *, models: Path, data: Path, staging: Path) -> None:
        self._roots = {Area.MODELS: models, Area.DATA: data, Area.STAGING: staging}

    def root(self, area: Area) -> Path:
        """The folder of ``area``."""
        return self._roots[area]

    def path(self, key: StagingKey) -> Path:
        """
        Where ``key`` is on the disk.

        Raises:
            EscapesRoot: through a symbolic link it would be outside its area.
        """
        return resolve_inside(self._roots[key.area], key.relative)
