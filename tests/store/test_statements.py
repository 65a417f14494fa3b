"""Named SQL."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from localai_dist.store.statements import files, load_statements, parse, read

TEXT = """
-- What this file is about.

-- name: one
-- Gives one.
-- Really.
select 1;

-- name: two
-- Changes something.
-- acts: none
update t
set n = %(n)s;
"""


class ParseTests(SynchronousTestCase):
    """Files of statements."""

    def test_statements_come_by_name(self) -> None:
        """Each statement is found by its name, with its comment, and names itself to the server."""
        found = parse(TEXT, "some.sql")
        self.assertEqual(list(found), ["one", "two"])
        self.assertEqual(found["one"].sql, "/* some.one */ select 1")
        self.assertEqual(found["one"].why, "Gives one. Really.")
        self.assertEqual(found["two"].sql, "/* some.two */ update t\nset n = %(n)s")
        self.assertEqual((found["one"].acts, found["two"].acts), (None, "none"))

    def test_mistakes_are_named(self) -> None:
        """Two statements of one name, one without SQL or comment, or a file without any, are refused."""
        for text, said in (
            ("select 1;", "no '-- name:' header"),
            ("-- name: a\n-- why\nselect 1;\n-- name: a\n-- why\nselect 2;", "twice"),
            ("-- name: a\nselect 1;", "wants a comment"),
            ("-- name: a\n-- why\n", "wants a comment"),
        ):
            error = self.assertRaises(ValueError, parse, text, "bad.sql")
            self.assertIn(said, str(error))
            self.assertIn("bad.sql", str(error))

    def test_the_files_in_the_package_parse(self) -> None:
        """Every SQL file that ships can be loaded, and what it gives can't be changed."""
        self.assertIn("nodes.sql", files())
        for file in files():
            loaded = load_statements(file)
            self.assertEqual(set(loaded), set(read(file)))
            self.assertFalse(hasattr(loaded, "__setitem__"))
