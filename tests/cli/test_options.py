"""The daemons' command lines."""

import sys
from io import StringIO

from twisted.application.service import IServiceMaker
from twisted.plugin import getPlugins
from twisted.trial.unittest import SynchronousTestCase

from localai_dist.cli.agent import Options as AgentOptions
from localai_dist.cli.frontend import Options as FrontendOptions
from localai_dist.cli.options import DaemonOptions
from localai_dist.cli.worker import Options as WorkerOptions
from localai_dist.settings.option import options_of

ALL: tuple[type[DaemonOptions], ...] = (FrontendOptions, WorkerOptions, AgentOptions)


class OptionsCase(SynchronousTestCase):
    """Parsing with the streams caught."""

    def setUp(self) -> None:
        self.out, self.err = StringIO(), StringIO()
        self.patch(sys, "stdout", self.out)
        self.patch(sys, "stderr", self.err)

    def parsed(self, options: type[DaemonOptions], *words: str) -> dict[str, str]:
        """The flags that ``words`` give."""
        made = options()
        made.parseOptions(list(words))
        return made.flags()

    def refused(self, options: type[DaemonOptions], *words: str) -> str:
        """The one line that ``words`` are refused with."""
        ended = self.assertRaises(SystemExit, options().parseOptions, list(words))
        self.assertEqual(ended.code, 2)
        line = self.err.getvalue()
        self.assertEqual(line.count("\n"), 1)
        return line


class ParsingTests(OptionsCase):
    """Words to flags."""

    def test_only_what_was_given(self) -> None:
        """A flag that was not given says nothing, so that the environment can."""
        self.assertEqual(self.parsed(FrontendOptions), {})
        self.assertEqual(
            self.parsed(FrontendOptions, "--address=:80", "--route-wait", "1s"), {"address": ":80", "route-wait": "1s"}
        )

    def test_switches(self) -> None:
        """A switch is turned on, turned off, and understood with a value as other programs write it."""
        for words, meaning in (
            (["--auto-approve-nodes"], "true"),
            (["--auto-approve-nodes=true"], "true"),
            (["--no-auto-approve-nodes"], "false"),
            (["--auto-approve-nodes=false"], "false"),
        ):
            self.assertEqual(self.parsed(FrontendOptions, *words), {"auto-approve-nodes": meaning})
        self.assertIn("neither true nor false", self.refused(FrontendOptions, "--auto-approve-nodes=maybe"))

    def test_unknown_flag(self) -> None:
        """An unknown flag is one line that names the nearest known one, and exit code 2."""
        line = self.refused(FrontendOptions, "--adress=:80")
        self.assertEqual(line, "localai-frontend: unknown option --adress: did you mean '--address'?\n")

    def test_stray_word(self) -> None:
        """A word that is no option is refused."""
        self.assertIn("'serve'", self.refused(WorkerOptions, "serve"))

    def test_missing_value(self) -> None:
        """A flag without its value is refused."""
        self.assertIn("--address", self.refused(FrontendOptions, "--address"))

    def test_secret_flags(self) -> None:
        """A secret on the command line is refused with the variable to use, and is not repeated (WALK-23)."""
        for options, flag in ((FrontendOptions, "api-key"), (FrontendOptions, "auth-database-url")):
            self.err.truncate(0)
            self.err.seek(0)
            line = self.refused(options, f"--{flag}=hunter2")
            self.assertIn("LOCALAI_" + flag.upper().replace("-", "_"), line)
            self.assertNotIn("hunter2", line)

    def test_old_registration_token_flag(self) -> None:
        """The old --registration-token is still taken, by all three."""
        for options in ALL:
            self.assertEqual(self.parsed(options, "--registration-token=t"), {"registration-token": "t"})

    def test_broker_flags(self) -> None:
        """Every old broker flag is taken by all three daemons, switches with and without a value (WALK-20)."""
        for options in ALL:
            for old in options.settings_type.accepted:
                given = [f"--{old.flag}=/no/such/file"] if old.takes_value else [f"--{old.flag}", f"--{old.flag}=true"]
                for word in given:
                    self.assertIn(old.flag, self.parsed(options, word))


class HelpTests(OptionsCase):
    """``--help``."""

    def help_of(self, options: type[DaemonOptions]) -> str:
        """What --help prints."""
        self.out.truncate(0)
        self.out.seek(0)
        ended = self.assertRaises(SystemExit, options().parseOptions, ["--help"])
        self.assertEqual(ended.code, 0)
        return self.out.getvalue()

    def test_every_option_is_listed(self) -> None:
        """The help lists every option with its flag, its variable and its default (WALK-13)."""
        for options in ALL:
            text = self.help_of(options)
            for row in options_of(options.settings_type):
                self.assertIn(row.env, text)
                if not row.secret:
                    self.assertIn(f"--{row.flag}", text)
                    self.assertIn(row.shown_default, text)

    def test_broker_is_hidden(self) -> None:
        """Nothing of the old broker is shown (WALK-20)."""
        for options in ALL:
            text = self.help_of(options)
            for old in options.settings_type.accepted:
                self.assertNotRegex(text, rf"--{old.flag}\b(?!-)")
            self.assertNotIn("nats-", text)

    def test_help_shows_no_secret(self) -> None:
        """The help shows defaults, never what is set in the environment (WALK-23)."""
        import os

        self.patch(os, "environ", {**os.environ, "LOCALAI_REGISTRATION_TOKEN": "hunter2"})
        for options in ALL:
            self.assertNotIn("hunter2", self.help_of(options))

    def test_version(self) -> None:
        """--version names the program's own version."""
        self.assertRaises(SystemExit, FrontendOptions().parseOptions, ["--version"])
        self.assertRegex(self.out.getvalue(), r"^localai-dist \d")


class PluginTests(SynchronousTestCase):
    """What twistd finds."""

    def test_three_daemons(self) -> None:
        """twistd knows the three daemons, and each brings its options (WALK-13)."""
        found = {
            plugin.tapname: plugin for plugin in getPlugins(IServiceMaker) if plugin.tapname.startswith("localai-")
        }
        self.assertEqual(set(found), {"localai-frontend", "localai-worker", "localai-agent-worker"})
        self.assertEqual({plugin.options for plugin in found.values()}, set(ALL))
