"""One option, and how a frozen settings class is a table of them."""

from __future__ import annotations

from dataclasses import Field, dataclass, field, fields
from typing import Any, TypeVar

from localai_dist.settings.kinds import SWITCH, Kind

T = TypeVar("T")

_ROW = "option"
PREFIX = "LOCALAI_"


@dataclass(frozen=True, slots=True)
class Option:
    """
    One row of the table.

    Attributes:
        name: the field of the settings class; the environment variable without ``LOCALAI_``, in lower case.
        flag: long flag without dashes; also the YAML key (there with ``_`` or ``-``).
        kind: how its text is read.
        default: the value when nobody says anything; None or empty where the help says what happens then.
        help: one sentence for an operator.
        secret: never shown; no flag takes the value (environment, ``…_FILE`` or YAML).
        flag_tolerated: a secret whose old flag is still taken, with a warning.
        zero_is_default: 0 means the default (for numbers that can't be 0).
        least: the smallest number allowed.
        lab: a time knob meant for tests and small labs.
    """

    name: str
    flag: str
    kind: Kind[Any]
    default: Any
    help: str
    secret: bool = False
    flag_tolerated: bool = False
    zero_is_default: bool = False
    least: float | None = None
    lab: bool = False

    @property
    def env(self) -> str:
        """The environment variable."""
        return PREFIX + self.name.upper()

    @property
    def env_file(self) -> str:
        """The variable that names a file holding a secret's value."""
        return self.env + "_FILE"

    @property
    def key(self) -> str:
        """The YAML key, as documented."""
        return self.flag.replace("-", "_")

    @property
    def is_switch(self) -> bool:
        """Whether its flag takes no value."""
        return self.kind is SWITCH

    @property
    def shown_default(self) -> str:
        """The default as an operator would write it; empty where there is none."""
        return "" if self.default is None or self.default == "" else self.kind.show(self.default)


def option(kind: Kind[T], default: T, help: str, *, flag: str = "", secret: bool = False, **more: Any) -> T:
    """
    A field of a settings class that is also a row of its table.

    Args:
        kind: how its text is read.
        default: typed value.
        help: one sentence for an operator.
        flag: when it differs from the field's name with dashes.
        secret: see ``Option``; such a field is left out of the class's ``repr``.
        more: the remaining attributes of ``Option``.
    """
    row = {"kind": kind, "default": default, "help": help, "flag": flag, "secret": secret, **more}
    declared: Any = field(default_factory=lambda: default, repr=not secret, metadata={_ROW: row})
    return declared  # a dataclass field stands where its value will be


def options_of(settings_type: type[Any]) -> tuple[Option, ...]:
    """The table of a settings class, in the order of its fields."""
    return tuple(_row(declared) for declared in fields(settings_type) if _ROW in declared.metadata)


def _row(declared: Field[Any]) -> Option:
    row = dict(declared.metadata[_ROW])
    flag = row.pop("flag") or declared.name.replace("_", "-")
    return Option(name=declared.name, flag=flag, **row)
