"""What a daemon checks before it runs."""

import io
import os
import socket
from contextlib import redirect_stderr
from pathlib import Path

from twisted.logger import capturedLogs, formatEvent
from twisted.trial.unittest import SynchronousTestCase

from localai_dist.cli.frontend import Options, warn_of_open_doors
from localai_dist.cli.start import check_can_listen, make_folder, one_clear_line, prepared
from localai_dist.errors import UserMistake
from localai_dist.settings.frontend import FrontendSettings
from localai_dist.settings.kinds import HostPort


class StartCase(SynchronousTestCase):
    """A folder, and an environment without our variables."""

    def setUp(self) -> None:
        self.folder = Path(self.mktemp())
        self.folder.mkdir()
        clean = {name: value for name, value in os.environ.items() if not name.startswith("LOCALAI_")}
        self.patch(os, "environ", {**clean, "LOCALAI_AUTH_DATABASE_URL": "postgresql:///x"})

    def settings(self, *words: str) -> FrontendSettings:
        """The settings that ``words`` make."""
        options = Options()
        options.parseOptions(list(words))
        return prepared(options, FrontendSettings)


class PreparedTests(StartCase):
    """From the command line to settings."""

    def test_configuration_file(self) -> None:
        """--config names a YAML file; LOCALAI_CONFIG names one when the flag doesn't."""
        file = self.folder / "c.yaml"
        file.write_text("route_wait: 3s\n")
        self.assertEqual(self.settings(f"--config={file}").route_wait, 3)
        os.environ["LOCALAI_CONFIG"] = str(file)
        self.assertEqual(self.settings().route_wait, 3)

    def test_unknown_variable(self) -> None:
        """A variable nobody reads is told on stderr and in the log, with the nearest one; the start goes on."""
        os.environ["LOCALAI_MODELS_PAHT"] = "/secret/place"
        stderr = io.StringIO()
        with redirect_stderr(stderr), capturedLogs() as logged:
            self.settings()
        line = "localai-frontend: the variable LOCALAI_MODELS_PAHT is not known and has no effect"
        self.assertEqual(stderr.getvalue(), f"{line}: did you mean 'LOCALAI_MODELS_PATH'?\n")
        self.assertIn(line, " ".join(formatEvent(event) for event in logged))

    def test_no_api_key(self) -> None:
        """A frontend without any API key says so in one line of its log; one with a key does not."""
        for key, lines in (("", 1), ("sk-hunter2", 0)):
            os.environ["LOCALAI_API_KEY"] = key
            with capturedLogs() as logged:
                warn_of_open_doors(self.settings())
            said = [formatEvent(event) for event in logged]
            self.assertEqual(["LOCALAI_API_KEY" in line for line in said], [True] * lines)

    def test_missing_configuration_file(self) -> None:
        """A configuration file that is not there is named."""
        error = self.assertRaises(UserMistake, self.settings, "--config=/no/such.yaml")
        self.assertIn("/no/such.yaml", str(error))

    def test_paths(self) -> None:
        """Folders are absolute afterwards."""
        self.assertEqual(self.settings("--data-path=d").data_path, os.path.join(os.getcwd(), "d"))


class OneLineTests(SynchronousTestCase):
    """Expected failures."""

    def test_one_line_and_exit_code(self) -> None:
        """An expected failure ends the program with one line and exit code 1 (WALK-14)."""

        def fail() -> None:
            with one_clear_line("localai-frontend"):
                raise UserMistake("first\n  second")

        ended = self.assertRaises(SystemExit, fail)
        self.assertEqual(ended.code, "localai-frontend: first second")

    def test_surprises_stay_surprises(self) -> None:
        """A fault of the program itself is not dressed up as a mistake of the operator."""

        def fail() -> None:
            with one_clear_line("localai-frontend"):
                raise ZeroDivisionError

        self.assertRaises(ZeroDivisionError, fail)


class PlacesTests(StartCase):
    """Folders and addresses."""

    def test_folder(self) -> None:
        """A missing folder is made for its user alone; what can't be made is named."""
        make_folder(str(self.folder / "a/b"), "data folder")
        self.assertEqual((self.folder / "a/b").stat().st_mode & 0o777, 0o700)
        (self.folder / "file").write_text("")
        error = self.assertRaises(UserMistake, make_folder, str(self.folder / "file/x"), "data folder")
        self.assertIn("data folder", str(error))

    def test_taken_address(self) -> None:
        """An address somebody else listens on is refused before the start, by name."""
        with socket.create_server(("127.0.0.1", 0)) as other:
            port = other.getsockname()[1]
            error = self.assertRaises(UserMistake, check_can_listen, HostPort("127.0.0.1", port), "LOCALAI_ADDRESS")
            self.assertIn(f"127.0.0.1:{port}", str(error))
            self.assertIn("choose another with LOCALAI_ADDRESS", str(error))
        check_can_listen(HostPort("127.0.0.1", 0), "LOCALAI_ADDRESS")
