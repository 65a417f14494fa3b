"""
Pages of the documentation as things to run: their ``console`` blocks, and whether what was printed is what they show.

A block opens with ```` ```console ````, then words: the machine it is typed on (when the page has several), and
``foreground`` for a command that stays until Ctrl-C. ``$ `` begins a command, ``> `` continues it, every other line is
what it prints. In what is printed, ``...`` stands for any text within a line, and a line of only ``...`` for any lines.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
ANY = "..."
FOREGROUND = "foreground"

_FENCE = re.compile(r"^(?P<ticks>```+)(?P<words>.*)$")


@dataclass(frozen=True)
class Block:
    """A fenced block: the words after its fence, its lines, and the number of its first line."""

    words: tuple[str, ...]
    lines: tuple[str, ...]
    number: int

    @property
    def language(self) -> str:
        """The first word, or nothing."""
        return self.words[0] if self.words else ""


@dataclass(frozen=True)
class Command:
    """
    One command of a page.

    Attributes:
        number: its line in the page.
        machine: where it is typed; empty on a page with one machine.
        text: what is typed.
        expected: the lines it prints.
        foreground: whether it stays until Ctrl-C.
    """

    number: int
    machine: str
    text: str
    expected: tuple[str, ...] = ()
    foreground: bool = False

    def mapped(self, table: Mapping[str, str]) -> Command:
        """The same with each key of ``table`` replaced by its value."""
        return replace(
            self, text=_mapped(self.text, table), expected=tuple(_mapped(line, table) for line in self.expected)
        )


@dataclass
class _Writing:
    number: int
    text: list[str]
    expected: list[str] = field(default_factory=list)


class BadPage(AssertionError):
    """A page that can't be run as it is written."""


def pages() -> list[Path]:
    """Every page: the README and all below ``docs/``."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks_of(text: str) -> list[Block]:
    """
    The fenced blocks of a page.

    Raises:
        BadPage: a fence that never closes.
    """
    found: list[Block] = []
    fence, words, lines, began = "", (), [], 0
    for number, line in enumerate(text.splitlines(), 1):
        opening = _FENCE.match(line)
        if fence:
            if line.rstrip() == fence:
                found.append(Block(words, tuple(lines), began))
                fence = ""
            else:
                lines.append(line)
        elif opening is not None:
            fence, words, lines, began = opening["ticks"], tuple(opening["words"].split()), [], number + 1
    if fence:
        raise BadPage(f"line {began - 1}: this block never ends")
    return found


def prose_of(text: str) -> str:
    """The page without its fenced blocks."""
    kept, fence = [], ""
    for line in text.splitlines():
        opening = _FENCE.match(line)
        if fence:
            fence = "" if line.rstrip() == fence else fence
        elif opening is not None:
            fence = opening["ticks"]
        else:
            kept.append(line)
    return "\n".join(kept)


def commands_of(text: str) -> list[Command]:
    """
    The commands of every ``console`` block, in order.

    Raises:
        BadPage: a block that does not begin with a command.
    """
    return [command for block in blocks_of(text) if block.language == "console" for command in _commands(block)]


def _commands(block: Block) -> list[Command]:
    written: list[_Writing] = []
    for number, line in enumerate(block.lines, block.number):
        if line.startswith("$ "):
            written.append(_Writing(number, [line[2:]]))
        elif not written:
            raise BadPage(f"line {number}: a console block begins with a command, '$ '")
        elif (line.startswith("> ") or line == ">") and not written[-1].expected:
            written[-1].text.append(line[2:])
        else:
            written[-1].expected.append(line)
    if not written:
        raise BadPage(f"line {block.number}: a console block without a command")
    stays = FOREGROUND in block.words
    if stays and len(written) != 1:
        raise BadPage(f"line {block.number}: a foreground block has one command")
    machine = next((word for word in block.words[1:] if word != FOREGROUND), "")
    return [Command(it.number, machine, "\n".join(it.text), tuple(it.expected), stays) for it in written]


def _mapped(text: str, table: Mapping[str, str]) -> str:
    """In one pass, the longest key first: what was put in is not looked at again."""
    keys = "|".join(re.escape(key) for key in sorted(table, key=len, reverse=True))
    return re.sub(keys, lambda found: table[found[0]], text) if keys else text


def matches(expected: Sequence[str], printed: str) -> bool:
    """Whether ``printed`` is what the page shows; spaces at the ends of lines do not count."""
    lines = [line.rstrip() for line in printed.strip("\n").splitlines()]
    return _lines_match([line.rstrip() for line in expected], lines)


def _lines_match(expected: Sequence[str], printed: Sequence[str]) -> bool:
    if not expected:
        return not printed
    if expected[0].strip() == ANY:
        return any(_lines_match(expected[1:], printed[skipped:]) for skipped in range(len(printed) + 1))
    return bool(printed) and _line_matches(expected[0], printed[0]) and _lines_match(expected[1:], printed[1:])


def _line_matches(expected: str, printed: str) -> bool:
    """Runs of spaces count as one: the columns of a table are as wide as their longest cell."""
    pattern = ".*".join(re.escape(" ".join(part.split(" "))) for part in re.sub(r" +", " ", expected).split(ANY))
    return re.fullmatch(pattern, re.sub(r" +", " ", printed)) is not None
