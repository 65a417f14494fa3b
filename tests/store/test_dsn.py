"""Database URLs."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from psycopg2.extensions import make_dsn, parse_dsn
from twisted.trial.unittest import SynchronousTestCase

from localai_dist.store.dsn import UnreadableDsn, names_in, one_line, parameters, redact, with_addresses, with_defaults

URL = "postgresql://ann:p%40ss@db.example:5433/cluster?sslmode=require"


class DsnTests(SynchronousTestCase):
    """Defaults in, secrets out."""

    def test_defaults_fill_in_and_never_overrule(self) -> None:
        """Keepalive and timeouts are added where the URL is silent; what it says itself stays."""
        found = parse_dsn(with_defaults(URL + "&keepalives_idle=60&application_name=mine", application_name="ours"))
        self.assertEqual(
            (found["password"], found["keepalives_idle"], found["tcp_user_timeout"], found["application_name"]),
            ("p@ss", "60", "10000", "mine"),
        )
        self.assertEqual(parse_dsn(with_defaults(URL, application_name="x" * 99))["application_name"], "x" * 63)

    def test_where_it_leads_without_the_secret(self) -> None:
        """A URL, or words, is shown as user, host, port and database."""
        for dsn, shown in (
            (URL, "ann@db.example:5433/cluster"),
            ("host=/run/pg user=bob password=pw dbname=x", "bob@/run/pg/x"),
            ("dbname=x", "(local socket)/x"),
            ("postgres://h", "h/"),
            ("gibberish secret", "(an unreadable database URL)"),
            ("", "(an unreadable database URL)"),
        ):
            self.assertEqual(redact(dsn), shown)

    def test_an_unreadable_url_is_not_quoted(self) -> None:
        """The error about a URL that can't be read shows nothing of it: any part may be the password."""
        for dsn in (
            "postgresql://u:top secret@[x",
            "nonsense",
            "  ",
            "postgresql://u:top@secret:word@h:5432/d",
            "postgresql://u:top@secret@h/d",
        ):
            error = self.assertRaises(UnreadableDsn, parameters, dsn)
            self.assertNotIn("secret", str(error))
            self.assertNotIn("nonsense", str(error))
        self.assertEqual(one_line("whatever nonsense", "nonsense"), "the database URL can't be read")

    def test_what_libpq_takes_is_taken(self) -> None:
        """Several hosts, a socket in the abstract namespace and a percent-encoded password can be read."""
        for dsn, host in (
            ("postgresql://u:top%40secret@h:5432/d", "h"),
            ("postgresql://u@a:1,b:2/d", "a,b"),
            ("host=@abstract user=u", "@abstract"),
        ):
            self.assertEqual(parameters(dsn)["host"], host)

    def test_driver_text_on_one_line(self) -> None:
        """The driver's lines are joined and its echo of the password blotted out."""
        self.assertEqual(one_line("failed:\n\tpassword p@ss is bad\n", URL), "failed:; password *** is bad")

    def test_names_are_found_and_get_addresses(self) -> None:
        """Names get their addresses beside them, several if they have several; sockets and addresses stay."""
        for dsn, names in (
            (URL, ["db.example"]),
            ("host=a,/run/pg,10.0.0.1,::1,fe80::1%eth0,b dbname=x", ["a", "b"]),
            ("host=a hostaddr=10.0.0.1", []),
            ("dbname=x", []),
        ):
            self.assertEqual(names_in(dsn), names)
        for dsn, wanted in (
            ("host=a port=5", ("a,a", "::1,127.0.0.1", "5,5")),
            ("host=a,/run/pg port=5,6", ("a,a,/run/pg", "::1,127.0.0.1,", "5,5,6")),
        ):
            found = parse_dsn(with_addresses(dsn, {"a": ["::1", "127.0.0.1"]}))
            self.assertEqual((found["host"], found["hostaddr"], found["port"]), wanted)

    @given(st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=4, max_size=20))
    def test_no_password_is_ever_shown(self, password: str) -> None:
        """Whatever the password is, it does not show."""
        dsn = make_dsn(host="h", user="u", dbname="d", password=password)
        self.assertEqual(redact(dsn), "u@h/d")
        self.assertNotIn(password, one_line(f"no: {password}!", dsn))
