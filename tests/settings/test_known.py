"""Variables that mean nothing here."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from localai_dist.settings.known import known_variables, unknown_variables


class UnknownTests(SynchronousTestCase):
    """What a daemon says of its environment."""

    def said(self, *names: str) -> str:
        """The warnings about variables of these names."""
        return "\n".join(unknown_variables(dict.fromkeys(names, "hunter2")))

    def test_slips(self) -> None:
        """A mistyped variable is named with the nearest known one, and its value is not shown."""
        for name, meant in (
            ("LOCALAI_REGISTER_T0", "LOCALAI_REGISTER_TO"),
            ("LOCALAI_REGISTRATION_TOKEN_FIL", "LOCALAI_REGISTRATION_TOKEN_FILE"),
            ("LOCALAI_API_KEYS_FILE", "LOCALAI_API_KEY_FILE"),
            ("LOCALAI_NODE_NAME_FILE", "LOCALAI_NODE_NAME"),
            ("LOCALAI_BACKENDS_PAHT", "LOCALAI_BACKENDS_PATH"),
            ("LOCALAI_BACKEND_GALERIES", "LOCALAI_BACKEND_GALLERIES"),
        ):
            said = self.said(name)
            self.assertIn(f"the variable {name} is not known and has no effect: did you mean {meant!r}?", said)
            self.assertNotIn("hunter2", said)
        self.assertIn("LOCALAI_ZZZ is not known", self.said("LOCALAI_ZZZ"))

    def test_known_ones(self) -> None:
        """What any daemon, the operator's command, a backend or an old setup sets is no reason for a word."""
        old = ("LOCALAI_NATS_URL", "LOCALAI_DISTRIBUTED", "LOCALAI_ADVERTISE_ADDR")
        families = ("LOCALAI_BACKEND_OF_MINE", "LOCALAI_TEST_POSTGRES")
        others = ("PATH", "LOCALAI_GRPC_AUTH_TOKEN", "LOCALAI_SERVER", "LOCALAI_CLI_API_KEY_FILE", "LOCALAI_CONFIG")
        self.assertEqual(self.said(*old, *families, *others, *known_variables()), "")
