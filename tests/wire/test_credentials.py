"""Secrets as they travel and as they are stored."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from localai_dist.wire import credentials

tokens = st.text(st.characters(codec="utf-8"), min_size=1, max_size=60)


class TokenTests(SynchronousTestCase):
    """Minting, storing and recognising a token."""

    def test_minted_token_carries_all_its_entropy(self) -> None:
        """A token is at least 26 plain characters, and other random bytes give another token."""
        one, other = credentials.mint_token(b"\0" * 16), credentials.mint_token(b"\0" * 15 + b"\1")
        self.assertRegex(one, r"\A[a-z2-7]{26,}\Z")
        self.assertNotEqual(one, other)

    def test_too_little_entropy_is_refused(self) -> None:
        """A token of less than 128 bits is never minted."""
        with self.assertRaises(ValueError):
            credentials.mint_token(b"\0" * 15)

    def test_digest_is_sha256_in_hex(self) -> None:
        """Only the hexadecimal SHA-256 of a token is stored (WALK-9)."""
        self.assertEqual(credentials.digest("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad")

    @given(tokens)
    def test_a_token_matches_its_own_digest(self, token: str) -> None:
        """Whoever has the token is recognised, whatever case the stored digest has."""
        self.assertTrue(credentials.matches(token, credentials.digest(token)))
        self.assertTrue(credentials.matches(token, credentials.digest(token).upper()))

    @given(tokens, tokens)
    def test_another_token_does_not_match(self, token: str, other: str) -> None:
        """Another token is never recognised."""
        if token != other:
            self.assertFalse(credentials.matches(other, credentials.digest(token)))

    def test_empty_admits_nobody(self) -> None:
        """An empty token or an empty stored digest matches nothing, not even the other's emptiness."""
        for token, stored in [("", ""), (None, None), ("", credentials.digest("")), ("t", ""), ("t", None)]:
            self.assertFalse(credentials.matches(token, stored))

    def test_a_digest_that_is_no_digest_matches_nothing(self) -> None:
        """A stored text that is not a digest, even one outside ASCII, refuses instead of failing."""
        self.assertFalse(credentials.matches("t", "é"))
        self.assertFalse(credentials.matches("t", "t"))


class SharedSecretTests(SynchronousTestCase):
    """The registration token."""

    def test_only_the_configured_secret_is_admitted(self) -> None:
        """The shared secret is compared whole; an empty configuration admits nobody."""
        self.assertTrue(credentials.same_secret("s3cret", "s3cret"))
        for presented, configured in [("s3cre", "s3cret"), ("", ""), (None, None), ("x", ""), ("", "x"), ("é", "e")]:
            self.assertFalse(credentials.same_secret(presented, configured))


class BearerTests(SynchronousTestCase):
    """The Authorization header."""

    def test_scheme_in_any_case_token_as_it_is(self) -> None:
        """``bearer`` may be written in any case; the token keeps its own."""
        for header in ("Bearer AbC", "bearer AbC", "BEARER  AbC ", " Bearer AbC"):
            self.assertEqual(credentials.bearer(header), "AbC")

    def test_no_bearer_is_none(self) -> None:
        """A missing header, another scheme or an empty token is no token."""
        for header in (None, "", "Bearer", "Bearer ", "Basic AbC", "AbC"):
            self.assertIsNone(credentials.bearer(header))

    @given(st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1))
    def test_round_trip(self, token: str) -> None:
        """What one side presents is what the other side reads."""
        self.assertEqual(credentials.bearer(credentials.authorization(token)), token)
