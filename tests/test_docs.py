"""The documentation against the code: options, commands, links, paths and tables it names are there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import click
from twisted.scripts.twistd import ServerOptions
from twisted.trial.unittest import SynchronousTestCase

from localai_dist import reach
from localai_dist.catalog import parse
from localai_dist.cli.operator.main import command
from localai_dist.httpapi.openai.requests import ChatRequest
from localai_dist.reach import Answer
from localai_dist.settings.agent import AgentSettings
from localai_dist.settings.frontend import FrontendSettings
from localai_dist.settings.option import options_of
from localai_dist.settings.worker import WorkerSettings
from tests.support.pages import ROOT, BadPage, Command, blocks_of, commands_of, matches, pages, prose_of

DAEMONS = (FrontendSettings, WorkerSettings, AgentSettings)
OTHER_VARIABLES = {
    "LOCALAI_CONFIG": "localai_dist/cli/options.py",
    "LOCALAI_SERVER": "localai_dist/cli/operator/main.py",
    "LOCALAI_CLI_API_KEY": "localai_dist/cli/operator/context.py",
    "LOCALAI_CLI_API_KEY_FILE": "localai_dist/cli/operator/context.py",
    "LOCALAI_GRPC_AUTH_TOKEN": "localai_dist/worker/environment.py",
}
"""Variables that are no daemon's option, and the file that reads or sets each."""
FOREIGN_FLAGS = {"--addr", "--no-deps"}
"""Flags of other programs that pages name: a backend's, pip's."""
KINDS = {"feature", "bugfix", "doc", "removal", "misc"}

_VARIABLE = re.compile(r"\bLOCALAI_[A-Z0-9_]*[A-Z0-9]\b")
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_INLINE = re.compile(r"`([^`\n]+)`")
_FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9](?![\w-]*[A-Z])")
_PATH = re.compile(r"(?:localai_dist|docs|tests|systemd|twisted|bench)/[\w./-]*")


def texts() -> Iterator[tuple[str, str]]:
    """Every page's name and text."""
    for page in pages():
        yield str(page.relative_to(ROOT)), page.read_text(encoding="utf-8")


def told() -> Iterator[tuple[str, str]]:
    """The same without the acceptance lines, which are written before the code and name it in short."""
    return ((name, text) for name, text in texts() if not name.startswith("docs/acceptance/"))


def anchors(page: Path) -> set[str]:
    """What a link may name behind ``#``: the headings, as GitHub turns them into anchors."""
    headings = re.findall(r"^#+ (.*)$", prose_of(page.read_text(encoding="utf-8")), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def commands_below(
    group: click.Command, words: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """The operator's command and all below it, each with its words."""
    yield words, group
    if isinstance(group, click.Group):
        for name, below in group.commands.items():
            yield from commands_below(below, (*words, name))


def known_flags() -> set[str]:
    """Every flag that the daemons, twistd and the operator's command take."""
    flags = {"--help", "--version", "--config", *FOREIGN_FLAGS}
    for settings in DAEMONS:
        names = [row.flag for row in options_of(settings)] + [old.flag for old in settings.accepted]
        flags |= {prefix + name for name in names for prefix in ("--", "--no-")}
    flags |= {"--" + name.rstrip("=") for name in ServerOptions().longOpt}
    for _, one in commands_below(command):
        for parameter in one.params:
            flags |= {*parameter.opts, *parameter.secondary_opts}
    return flags


class NameTests(SynchronousTestCase):
    """What pages name is there."""

    def test_variables(self) -> None:
        """Every LOCALAI_ variable a page names is an option, its file form, a tolerated old name, or read elsewhere."""
        known = set(OTHER_VARIABLES)
        for settings in DAEMONS:
            for row in options_of(settings):
                known |= {row.env, row.env_file} if row.secret else {row.env}
            known |= {old.env for old in settings.accepted}
        unknown = {f"{name}: {found}" for name, text in texts() for found in _VARIABLE.findall(text)}
        self.assertEqual({one for one in unknown if one.partition(": ")[2] not in known}, set())

    def test_other_variables_are_read(self) -> None:
        """A variable that is excused from being an option is named by the module that reads it."""
        for variable, module in OTHER_VARIABLES.items():
            self.assertIn(variable.removesuffix("_FILE"), (ROOT / module).read_text(encoding="utf-8"))

    def test_flags(self) -> None:
        """Every flag a page names in its text exists."""
        known = known_flags()
        for name, text in told():
            for code in _INLINE.findall(prose_of(text)):
                self.assertEqual(set(_FLAG.findall(code)) - known, set(), f"{name}: {code}")

    def test_commands(self) -> None:
        """Every ``localai-dist`` command a page names exists."""
        known = {words for words, _ in commands_below(command)}
        groups = {words[0] for words in known if len(words) == 2}
        for name, text in told():
            for code in re.findall(r"(?:^|[`/ ])localai-dist ((?:[a-z]+ ?)+)", text, flags=re.MULTILINE):
                words = tuple(code.split())
                named = words[:2] if words[0] in groups else words[:1]
                self.assertIn(named, known, f"{name}: localai-dist {code}")

    def test_paths(self) -> None:
        """Every file of this repository a page names is there, also where the package's name is left out."""
        for name, text in told():
            for code in _INLINE.findall(prose_of(text)):
                if _PATH.fullmatch(code):
                    self.assertTrue((ROOT / code).exists(), f"{name}: {code}")
                elif re.fullmatch(r"\w+(/\w+)+\.py", code):
                    self.assertTrue((ROOT / "localai_dist" / code).exists(), f"{name}: {code}")

    def test_links(self) -> None:
        """Every relative link leads to a file, and to a heading of it where it names one."""
        for name, text in texts():
            for target in _LINK.findall(prose_of(text)):
                if "://" in target:
                    continue
                path, _, anchor = target.partition("#")
                page = (ROOT / name).parent / path if path else ROOT / name
                self.assertTrue(page.exists(), f"{name}: {target}")
                if anchor:
                    self.assertIn(anchor, anchors(page), f"{name}: {target}")

    def test_change_fragments(self) -> None:
        """Each note on a change has a kind that exists, and says something."""
        for fragment in (ROOT / "docs" / "changes").iterdir():
            if fragment.name != "README.md":
                self.assertIn(fragment.suffix[1:], KINDS, fragment.name)
                self.assertTrue(fragment.read_text(encoding="utf-8").strip(), fragment.name)


class TableTests(SynchronousTestCase):
    """Tables that say what code says."""

    def test_model_keys(self) -> None:
        """The page on models lists exactly the keys that model files have."""
        text = (ROOT / "docs/howto/models.md").read_text(encoding="utf-8")
        named = [
            key for line in text.splitlines() if line.startswith("| `") for key in _INLINE.findall(line.split("|")[1])
        ]
        top = set(parse._ModelKeys.__struct_fields__)
        inner = set(parse._ParametersKeys.__struct_fields__)
        known = (top - {"parameters", "template"}) | inner | set(parse._TemplateKeys.__struct_fields__)
        self.assertEqual({key.rpartition(".")[2] for key in named}, known)

    def test_chat_fields(self) -> None:
        """The page on OpenAI's API lists exactly the fields that a chat has; of others, that they are ignored."""
        text = (ROOT / "docs/reference/openai.md").read_text(encoding="utf-8")
        section = text[text.index("## Chats") : text.index("### Messages")]
        rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("| `")]
        served = {field for row in rows if row[-1].strip() != "ignored" for field in _INLINE.findall(row[0])}
        ignored = {field for row in rows if row[-1].strip() == "ignored" for field in _INLINE.findall(row[0])}
        known = set(ChatRequest.__struct_fields__)
        self.assertEqual({field.partition(".")[0] for field in served}, known)
        self.assertEqual(ignored & known, set())

    def test_every_outcome(self) -> None:
        """The table of outcomes says what the predicates say."""
        text = (ROOT / "docs/explanation/conditions.md").read_text(encoding="utf-8")
        table = text[text.index("## Every outcome") :].splitlines()
        shown = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in table if line.startswith("| `")]
        self.assertEqual([row[1:] for row in shown], [outcome_row(outcome) for outcome in OUTCOMES])


OUTCOMES: list[reach.Outcome] = [
    reach.Answered(Answer.ERROR),
    reach.Answered(Answer.MODEL_NOT_LOADED),
    reach.Refused("code", "text"),
    reach.NotServed("text"),
    reach.VerbNotServed("verb"),
    reach.NoRoute("node", departed=False),
    reach.NoRoute("node", departed=True),
    reach.Reconnecting("node"),
    reach.PeerUnreachable("peer", "text"),
    reach.RegistryUnknown("text"),
    reach.DeadlineExceeded(),
    reach.Cancelled(),
]
"""In the order of the page's table."""


def outcome_row(outcome: reach.Outcome) -> tuple[str, ...]:
    """A line of that table behind its first column."""
    client = reach.client_answer(outcome)
    return (
        f"{client.status} `{client.code}`",
        str(client.retry_after or "–"),
        "yes" if reach.may_reap(outcome) else "no",
        "yes" if reach.may_demote(outcome) else "no",
        reach.may_retry(outcome).value,
    )


class PageTests(SynchronousTestCase):
    """Reading pages, which the test of their commands relies on."""

    def test_commands_of_a_block(self) -> None:
        """A command, its continuation and what it prints are told apart; other blocks are left alone."""
        text = "```text\n$ not this\n```\n\n```console box\n$ cat <<END\n> a\n>\n> END\na\n\n$ true\n```\n"
        self.assertEqual(
            commands_of(text), [Command(6, "box", "cat <<END\na\n\nEND", ("a", "")), Command(12, "box", "true")]
        )

    def test_foreground(self) -> None:
        """A block of a command that stays holds nothing else."""
        self.assertTrue(commands_of("```console foreground\n$ sleep 9\n```")[0].foreground)
        self.assertRaises(BadPage, commands_of, "```console foreground\n$ sleep 9\n$ true\n```")

    def test_bad_pages(self) -> None:
        """A block without a command, or one that never ends, is a mistake and not an empty page."""
        for bad in ("```console\nno command\n```", "```console\n```", "```console\n$ true"):
            self.assertRaises(BadPage, commands_of, bad)

    def test_mapping_is_one_pass(self) -> None:
        """What a table puts in is not replaced again, and the longest key wins."""
        table = {"venv": "/x/venv/y", "venv/bin": "B"}
        self.assertEqual(Command(1, "", "venv/bin venv", ("venv",)).mapped(table).text, "B /x/venv/y")

    def test_every_page_can_be_read(self) -> None:
        """No page has a block that never ends, and every block says its language."""
        for name, text in texts():
            for block in blocks_of(text):
                self.assertTrue(block.language or name.startswith("docs/wire/"), f"{name}, line {block.number}")

    def test_wildcards(self) -> None:
        """Three dots stand for text in a line, or for lines; all else must be there, spaces apart."""
        self.assertTrue(matches(["a  ... c", "...", "end"], "a b c\nx\ny\nend\n"))
        self.assertTrue(matches(["...", "end"], "end"))
        self.assertTrue(matches([], "\n"))
        for expected, printed in ((["a"], ""), ([], "a"), (["a"], "a\nb"), (["a...c"], "ab"), (["a.c"], "abc")):
            self.assertFalse(matches(expected, printed), (expected, printed))
