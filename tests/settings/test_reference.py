"""The generated page of options."""

from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

import localai_dist
from localai_dist.settings import reference

ROOT = Path(localai_dist.__file__).resolve().parent.parent


class ReferenceTests(SynchronousTestCase):
    """``docs/reference/options.md``."""

    def test_committed_page_is_current(self) -> None:
        """The page in the repository is what the tables say; ``make docs`` writes it anew."""
        self.assertEqual((ROOT / "docs/reference/options.md").read_text(encoding="utf-8"), reference.page())

    def test_every_daemon_has_its_table(self) -> None:
        """All three daemons are on it."""
        for name in ("localai-frontend", "localai-worker", "localai-agent-worker"):
            self.assertIn(f"`twistd {name}`", reference.page())
