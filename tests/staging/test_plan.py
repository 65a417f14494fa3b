"""What goes where: keys, pieces, roots, sidecars."""

from twisted.trial.unittest import SynchronousTestCase

from localai_dist.staging.plan import is_sidecar, model_root, next_piece
from localai_dist.units import MiB


class PlanTests(SynchronousTestCase):
    def test_no_piece_is_larger_than_64_mib(self) -> None:
        """
        A 600 GB file is sent in requests no bigger than a small file's (LOAD-10).
        """
        total = 600 * 1000**3
        piece = next_piece(0, total)
        self.assertEqual(piece.length, 64 * MiB)
        self.assertEqual(str(piece), f"bytes 0-{64 * MiB - 1}/{total}")

    def test_pieces_cover_the_file_without_gap_or_overlap(self) -> None:
        """
        The pieces of a file are its bytes, once each.
        """
        offset, seen = 0, 0
        while True:
            piece = next_piece(offset, 1000, 64)
            seen += piece.length
            if piece.finishes:
                break
            offset = piece.end + 1
        self.assertEqual(seen, 1000)

    def test_the_root_is_the_remote_path_without_the_relative_one(self) -> None:
        """
        A backend finds its model folder however deep the file lies.
        """
        self.assertEqual(model_root("/d/models/tiny/sub/a.gguf", "sub/a.gguf"), "/d/models/tiny")
        self.assertEqual(model_root("/d/models/tiny/a.gguf", "a.gguf"), "/d/models/tiny")
        self.assertEqual(model_root("/d/elsewhere/b.gguf", "sub/a.gguf"), "/d/elsewhere")

    def test_hash_files_are_not_staged(self) -> None:
        """
        Files that only record a hash do not multiply, but a lone one is somebody's data (LOAD-13).
        """
        siblings = frozenset({"a.gguf", "a.gguf.sha256", "a.gguf.sha256.target", "lone.sha256"})
        self.assertTrue(is_sidecar("a.gguf.sha256", siblings))
        self.assertTrue(is_sidecar("a.gguf.sha256.target", siblings))
        self.assertFalse(is_sidecar("lone.sha256", siblings))
        self.assertFalse(is_sidecar("a.gguf", siblings))
