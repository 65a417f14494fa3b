"""The node's id and token on disk: ``node.json`` in the data folder, readable by its owner alone."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import msgspec

from localai_dist.errors import InvalidName, UserMistake
from localai_dist.ids import NodeId, parse_node_id

FILE_NAME = "node.json"


@dataclass(frozen=True, slots=True, repr=False)
class Identity:
    """
    Who this node is.

    Attributes:
        node_id: given by a frontend at the first registration.
        node_token: the node's own secret.
    """

    node_id: NodeId
    node_token: str

    def __repr__(self) -> str:
        """Without the token."""
        return f"Identity({self.node_id})"


class _File(msgspec.Struct):
    node_id: str
    node_token: str
    name: str = ""


class IdentityFile:
    """
    Where the identity is kept.

    Args:
        folder: the data folder; made with mode 0700 if it is not there.
        name: the node's, kept in the file: under another one the identity would be lost to a new node. A file of an
            earlier version holds none and takes this one.
    """

    def __init__(self, folder: Path, name: str = "") -> None:
        self.path = folder / FILE_NAME
        self._name = name

    def load(self) -> Identity | None:
        """
        The identity, or None before the first registration.

        Raises:
            UserMistake: the file can't be read, is not what it should be, or belongs to a node of another name; it is
                never overwritten then.
        """
        try:
            raw = self.path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise UserMistake(f"{self.path} can't be read: {error.strerror}") from error
        try:
            read = msgspec.json.decode(raw, type=_File)
            identity = Identity(parse_node_id(read.node_id), read.node_token)
        except (msgspec.DecodeError, UnicodeDecodeError, InvalidName) as error:
            raise UserMistake(
                f"{self.path} is damaged; restore it, or remove it to register this node anew (it will then wait for "
                "approval)"
            ) from error
        self._check_name(read.name)
        if not read.name and self._name:
            self.save(identity)
        return identity

    def _check_name(self, kept: str) -> None:
        if kept and self._name and kept != self._name:
            raise UserMistake(
                f"{self.path} belongs to the node {kept!r}, and this one is named {self._name!r}: set "
                f"LOCALAI_NODE_NAME={kept} to go on as that node, or use another data folder (LOCALAI_DATA_PATH), or "
                f"remove the file, to register {self._name!r} as a new one"
            )

    def save(self, identity: Identity) -> None:
        """
        Keep ``identity``, whole or not at all.

        Raises:
            UserMistake: it can't be written.
        """
        draft = self.path.with_name(FILE_NAME + ".tmp")
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            draft.unlink(missing_ok=True)
            descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(msgspec.json.encode(_File(identity.node_id, identity.node_token, self._name)) + b"\n")
                file.flush()
                os.fsync(file.fileno())
            draft.rename(self.path)
        except OSError as error:
            raise UserMistake(f"{self.path} can't be written: {error.strerror}") from error
