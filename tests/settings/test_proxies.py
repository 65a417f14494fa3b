"""Which proxy leads to an address."""

from __future__ import annotations

import base64

from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from localai_dist.errors import UserMistake
from localai_dist.settings.proxies import Proxies, Proxy, parse_proxies
from localai_dist.urls import bracketed

PROXY = "http://proxy.example:3128"


def exempt(words: str, host: str, port: int | None = None, scheme: str = "https") -> bool:
    """Whether ``NO_PROXY=words`` lets ``host`` be dialled directly."""
    environ = {"HTTPS_PROXY": PROXY, "HTTP_PROXY": PROXY, "NO_PROXY": words}
    return parse_proxies(environ).towards(scheme, host, port) is None


def named(text: str) -> Proxy:
    """The proxy that ``HTTPS_PROXY=text`` names."""
    found = parse_proxies({"HTTPS_PROXY": text}).towards("https", "front.example")
    assert found is not None
    return found


class VariableTests(SynchronousTestCase):
    """What the variables say."""

    def test_one_variable_for_each_scheme(self) -> None:
        """TLS goes by ``HTTPS_PROXY``, all else by ``HTTP_PROXY``, WebSockets like HTTP; none is the direct way."""
        both = parse_proxies({"HTTPS_PROXY": "http://a:1", "HTTP_PROXY": "http://b:2"})
        found = {scheme: str(both.towards(scheme, "front.example")) for scheme in ("https", "wss", "http", "ws")}
        self.assertEqual(found, {"https": "a:1", "wss": "a:1", "http": "b:2", "ws": "b:2"})
        self.assertIsNone(parse_proxies({"HTTPS_PROXY": "http://a:1"}).towards("ws", "front.example"))
        self.assertIsNone(Proxies().towards("wss", "front.example"))

    def test_capitals_win(self) -> None:
        """Both spellings are read; an empty variable is none."""
        read = parse_proxies({"https_proxy": "http://small:1", "HTTPS_PROXY": "http://large:1", "http_proxy": "x:5"})
        self.assertEqual({name: str(proxy) for name, proxy in read.named.items()}, {
            "HTTPS_PROXY": "large:1", "HTTP_PROXY": "x:5",
        })  # fmt: skip
        self.assertEqual(parse_proxies({"HTTPS_PROXY": " ", "HTTP_PROXY": ""}), Proxies())

    def test_addresses(self) -> None:
        """With or without a scheme, a port, credentials, a path; IPv6 in brackets."""
        for text, host, port in (
            ("http://proxy.example:3128", "proxy.example", 3128),
            ("proxy.example:3128", "proxy.example", 3128),
            ("http://proxy.example", "proxy.example", 80),
            ("HTTP://10.0.0.1:8080/", "10.0.0.1", 8080),
            ("http://[fd00::1]:3128", "fd00::1", 3128),
        ):
            proxy = named(text)
            self.assertEqual((proxy.host, proxy.port, proxy.authorization), (host, port, None), text)
            self.assertEqual(str(proxy), f"{bracketed(host)}:{port}")

    def test_credentials(self) -> None:
        """User and password are unquoted and sent as Basic; no text of the proxy has them."""
        for pair, sent in (("joe:p%40ss%3A%C3%A4", "joe:p@ss:ä"), ("joe", "joe:"), ("a%0d%0ab:c", "a\r\nb:c")):
            proxy = named(f"http://{pair}@proxy:1")
            self.assertEqual(proxy.authorization, "Basic " + base64.b64encode(sent.encode()).decode())
            self.assertNotIn("joe", f"{proxy} {proxy!r}")
            self.assertNotIn("Basic", f"{proxy} {proxy!r}")

    def test_what_is_no_proxy(self) -> None:
        """An address that can't be one is refused where it is needed, by its variable's name, and not repeated."""
        for text in (
            "socks5://joe:s3cret@proxy:1080",
            "https://joe:s3cret@proxy:1",
            "http://joe:s3cret@",
            "http://joe:s3cret@proxy:99999",
            "http://joe:s3cret@proxy:0x1",
            "http://joe:s3cret@proxy:0",
            "http://joe:s3cret@[::1",
            "http://joe:s3cret@pro xy:1",
            "http://joe:s3cret@proxy:1\r\nX: y",
            "http://joe:s3crét@proxy:1",
            "/joe:s3cret",
        ):
            proxies = parse_proxies({"https_proxy": text, "NO_PROXY": "near.example"})
            error = self.assertRaises(UserMistake, proxies.towards, "https", "front.example")
            self.assertIsNone(proxies.towards("https", "near.example"), "it is not needed there")
            self.assertIsNone(proxies.towards("http", "front.example"), "nor there")
            self.assertIn("HTTPS_PROXY", str(error))
            for secret in ("s3cr", "joe"):
                self.assertNotIn(secret, str(error))


class ExceptionTests(SynchronousTestCase):
    """What is reached without a proxy."""

    def test_this_machine(self) -> None:
        """Its own addresses are never asked for through a proxy."""
        for host in ("localhost", "LOCALHOST.", "127.0.0.1", "127.1.2.3", "::1"):
            self.assertTrue(exempt("", host), host)
        for host in ("localhost.example", "10.0.0.1", "fd00::1"):
            self.assertFalse(exempt("", host), host)

    def test_names(self) -> None:
        """A name means itself and what is below it, with a dot in front only what is below; ``*`` is everything."""
        words = "a.example, .b.example ,*.c.example,,UPPER.example"
        for host in ("a.example", "x.a.example", "A.EXAMPLE.", "x.b.example", "x.y.c.example", "upper.example"):
            self.assertTrue(exempt(words, host), host)
        for host in ("b.example", "c.example", "xa.example", "example", "a.example.net", "10.0.0.1"):
            self.assertFalse(exempt(words, host), host)
        self.assertTrue(exempt("x.example,*", "anything"))
        self.assertFalse(exempt(":443", "anything", 443))

    def test_addresses(self) -> None:
        """Addresses and networks; a name is never taken for one, nor an address for a name's end."""
        words = "10.0.0.1,192.168.0.0/16,fd00::/8,[2001:db8::1],2001:db8::2"
        for host in ("10.0.0.1", "192.168.4.5", "fd12::9", "2001:db8::1", "2001:db8::2"):
            self.assertTrue(exempt(words, host), host)
        for host in ("10.0.0.2", "110.0.0.1", "192.169.0.1", "2001:db8::3", "10.0.0.1.example", "a.10.0.0.1"):
            self.assertFalse(exempt(words, host), host)
        self.assertFalse(exempt("10.0.0.0/99,no/net", "10.0.0.1"))

    def test_ports(self) -> None:
        """A word with a port means that port alone; without one in the address it is the scheme's."""
        self.assertTrue(exempt("a.example:8443", "a.example", 8443))
        self.assertFalse(exempt("a.example:8443", "a.example", 443))
        self.assertTrue(exempt("a.example:443", "a.example"))
        self.assertTrue(exempt("a.example:80", "a.example", scheme="ws"))
        self.assertTrue(exempt("[2001:db8::1]:8080", "2001:db8::1", 8080))
        self.assertFalse(exempt("[2001:db8::1]:8080", "2001:db8::1", 80))
        self.assertTrue(exempt("10.0.0.1:81,10.0.0.1:82", "10.0.0.1", 82))
        self.assertFalse(exempt("a.example:8080²", "a.example", 8080))  # a digit that is no number

    @given(st.text(max_size=60), st.text(min_size=1, max_size=30))
    def test_nothing_breaks_it(self, words: str, host: str) -> None:
        """Whatever stands in the variable, an address has a way."""
        proxies = Proxies({"HTTPS_PROXY": Proxy("HTTPS_PROXY", "p", 1)}, parse_proxies({"NO_PROXY": words}).exceptions)
        proxies.towards("https", host, 443)
