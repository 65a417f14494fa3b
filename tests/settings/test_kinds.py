"""How one value is read."""

from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from localai_dist.errors import UserMistake
from localai_dist.settings import kinds
from localai_dist.settings.kinds import HostPort
from localai_dist.units import MiB


class HostPortTests(SynchronousTestCase):
    """Addresses to listen on and to dial."""

    def test_forms(self) -> None:
        """A port alone, a name, IPv4 and bracketed IPv6 are all addresses."""
        self.assertEqual(kinds.parse_host_port(":8080"), HostPort("", 8080))
        self.assertEqual(kinds.parse_host_port("127.0.0.1:0"), HostPort("127.0.0.1", 0))
        self.assertEqual(kinds.parse_host_port("[::1]:80"), HostPort("::1", 80))
        self.assertEqual(kinds.parse_host_port("gpu-7.example:65535"), HostPort("gpu-7.example", 65535))

    def test_refused(self) -> None:
        """No port, a bad port, or IPv6 without brackets is refused with the form that would be right."""
        for text in ("", "8080", "host", "host:", "host:http", ":65536", ":-1", "::1:80", "a b:80", "host:८०"):
            error = self.assertRaises(UserMistake, kinds.parse_host_port, text)
            self.assertIn("host:port", str(error))

    @given(st.sampled_from(["", "127.0.0.1", "::1", "name"]), st.integers(0, 65535))
    def test_round_trip(self, host: str, port: int) -> None:
        """What is shown is read back as the same address."""
        self.assertEqual(kinds.parse_host_port(str(HostPort(host, port))), HostPort(host, port))


class SwitchTests(SynchronousTestCase):
    """True and false."""

    def test_words(self) -> None:
        """The usual words for yes and no are understood."""
        for word in ("true", "YES", " on ", "1", "y", "enabled"):
            self.assertIs(kinds.parse_switch(word), True)
        for word in ("false", "No", "off", "0", "n", "disabled"):
            self.assertIs(kinds.parse_switch(word), False)

    def test_no_guess(self) -> None:
        """Anything else is an error, because a guess might open what should be closed."""
        for word in ("", "maybe", "2", "tru"):
            self.assertRaises(UserMistake, kinds.parse_switch, word)


class UrlTests(SynchronousTestCase):
    """Frontend addresses."""

    def test_several(self) -> None:
        """Several addresses stand with commas between; a trailing slash is dropped."""
        self.assertEqual(
            kinds.parse_urls("http://a:8080/, https://b ,ws://c:1"), ("http://a:8080", "https://b", "ws://c:1")
        )

    def test_refused(self) -> None:
        """Something without scheme or host, or with a bad port, is no address."""
        for text in ("a:8080", "ftp://a", "http://", "http://a:99999", "http://a:x", "/x"):
            self.assertRaises(UserMistake, kinds.parse_urls, text)

    def test_nothing_behind_the_path(self) -> None:
        """What stands behind a path can't be kept when ours is added, and may be a secret; it is refused unrepeated."""
        for text in ("http://a?hunter2", "http://a/b#hunter2", "http://a:", "http://a:/hunter2"):
            self.assertNotIn("hunter2", str(self.assertRaises(UserMistake, kinds.parse_urls, text)))

    def test_password_refused_and_not_repeated(self) -> None:
        """A password inside an address is refused, and the refusal does not repeat it (WALK-23)."""
        for text in ("http://u:hunter2@a:80", "http://u:hunter2@a:99999", "u:hunter2@a", "http://u:hunter2@"):
            error = self.assertRaises(UserMistake, kinds.parse_urls, text)
            self.assertNotIn("hunter2", str(error))


class OtherKindsTests(SynchronousTestCase):
    """The rest."""

    def test_labels(self) -> None:
        """Labels are pairs; a value may be empty and may hold an equals sign."""
        self.assertEqual(kinds.parse_labels("a=1, b=, c=x=y"), {"a": "1", "b": "", "c": "x=y"})
        self.assertRaises(UserMistake, kinds.parse_labels, "a")
        self.assertRaises(UserMistake, kinds.parse_labels, "=1")

    def test_vram_budget(self) -> None:
        """A share or a size, kept as it was written."""
        for text in ("80%", "0.8", "12GB", "12GiB", "12884901888"):
            self.assertEqual(kinds.parse_vram_budget(text), text)
        for text in ("120%", "lots", "-1"):
            self.assertRaises(UserMistake, kinds.parse_vram_budget, text)

    def test_upload_limit(self) -> None:
        """A bare number means MiB."""
        self.assertEqual(kinds.parse_upload_limit("15"), 15 * MiB)
        self.assertEqual(kinds.parse_upload_limit("1GB"), 10**9)

    def test_sizes(self) -> None:
        """A size is bytes or has a unit; none at all is shown as nothing."""
        self.assertEqual((kinds.MAYBE_SIZE.parse("7"), kinds.MAYBE_SIZE.parse("2GiB")), (7, 2048 * MiB))
        self.assertEqual((kinds.MAYBE_SIZE.show(None), kinds.MAYBE_SIZE.show(2048 * MiB)), ("", "2.0 GiB"))

    def test_numbers(self) -> None:
        """Whole numbers from 0, ports up to 65535, nothing else."""
        self.assertEqual(kinds.parse_count("7"), 7)
        self.assertEqual(kinds.parse_port("65535"), 65535)
        for text in ("", "-1", "1.5", "١"):
            self.assertRaises(UserMistake, kinds.parse_count, text)
        self.assertRaises(UserMistake, kinds.parse_port, "65536")

    def test_choice(self) -> None:
        """A word outside the list is refused with the list."""
        kind = kinds.choice("bound", "loose")
        self.assertEqual(kind.parse("Loose"), "loose")
        self.assertIn("bound, loose", str(self.assertRaises(UserMistake, kind.parse, "free")))

    def test_one_line(self) -> None:
        """A text with a line break is refused: it would break a header or a log line."""
        self.assertRaises(UserMistake, kinds.TEXT.parse, "a\nb")
