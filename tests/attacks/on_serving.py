"""Attacks on what a request brings along: its file, here and on the node."""

from tests.attacks.attack import Attack

ATTACKS: tuple[Attack, ...] = (
    Attack(
        name="a-requests-file-is-never-taken-back",
        file="localai_dist/serving/lent.py",
        old="            self._files.let_go(node, self._id)\n",
        new="            del node\n",
        reddens=(
            "tests.serving.test_transcribe.TranscribeTests.test_warm",
            "tests.serving.test_transcribe.TranscribeTests.test_the_client_leaves",
            "tests/process/test_media.py::test_a_client_that_leaves[True]",
        ),
        leaves_green=(
            "tests.serving.test_received",
            "tests.staging.test_request_files.RequestFilesTests.test_a_requests_life",
        ),
    ),
    Attack(
        name="a-received-file-stays",
        file="localai_dist/httpapi/form.py",
        old="            taking.file.remove()\n",
        new="            pass\n",
        reddens=(
            "tests.httpapi.test_transcriptions.AnswerTests.test_the_bytes_arrive",
            "tests.httpapi.test_transcriptions.EndingTests.test_the_client_leaves_in_the_middle_of_its_upload",
            "tests.httpapi.test_transcriptions.EndingTests.test_the_deadline_passes",
        ),
        leaves_green=("tests.httpapi.test_transcriptions.FormTests",),
    ),
    Attack(
        name="read-a-body-that-is-too-long",
        file="localai_dist/httpapi/form.py",
        old="    if length is not None and int(length) > limit:\n",
        new="    if length is not None and int(length) < 0:\n",
        reddens=("tests.httpapi.test_transcriptions.RefusalTests.test_too_long_is_told_before_it_is_read",),
        leaves_green=("tests.httpapi.test_transcriptions.RefusalTests.test_too_much_of_an_untold_length",),
    ),
    Attack(
        name="a-recording-in-memory",
        file="localai_dist/serving/received.py",
        old="        if len(self._waiting) >= AT_ONCE:\n",
        new="        if len(self._waiting) >= 1000 * AT_ONCE:\n",
        reddens=("tests.serving.test_received.ReceivedTests.test_memory_is_bounded",),
        leaves_green=("tests.serving.test_received.ReceivedTests.test_a_files_life",),
    ),
    Attack(
        name="a-full-node-is-the-end",
        file="localai_dist/serving/inference.py",
        old="                if search.replica is None or not search.others:\n",
        new="                if search.replica is None or search.others:\n",
        reddens=("tests.serving.test_transcribe.TranscribeTests.test_a_full_node",),
        leaves_green=("tests.serving.test_transcribe.TranscribeTests.test_another_node_gets_it_too",),
    ),
    Attack(
        name="sweep-what-is-being-written",
        file="localai_dist/worker/request_files.py",
        old="            if self._now() - touched <= LEFT_OVER or quota.is_live(owner):\n",
        new="            if self._now() - touched <= LEFT_OVER:\n",
        reddens=("tests.worker.test_sweeper.RequestFilesTests.test_leftovers_are_swept",),
        leaves_green=("tests.worker.test_sweeper.RequestFilesTests.test_links_are_never_followed",),
    ),
    Attack(
        name="sweep-what-waits-for-its-turn",
        file="localai_dist/serving/lent.py",
        old="        self._at = node\n",
        new="",
        reddens=("tests.serving.test_transcribe.TranscribeTests.test_a_long_wait",),
        leaves_green=("tests.serving.test_transcribe.TranscribeTests.test_warm",),
    ),
    Attack(
        name="the-floor-forgets-what-is-on-its-way",
        file="localai_dist/worker/request_files.py",
        old="shutil.disk_usage(root).free - to_come)",
        new="shutil.disk_usage(root).free)",
        reddens=("tests.worker.test_sweeper.RequestFilesTests.test_the_floor_counts_files_on_their_way",),
        leaves_green=("tests.staging.test_request_files.FreeSpaceTests.test_the_floor",),
    ),
    Attack(
        name="believe-a-picture-is-one",
        file="localai_dist/httpapi/openai/pictures.py",
        old="    if found is None:\n        raise",
        new="    if found is None:\n        return url\n        raise",
        reddens=("tests.httpapi.test_openai.WholeAnswerTests.test_parts_that_are_not_served",),
        leaves_green=("tests.httpapi.test_openai.WholeAnswerTests.test_content_in_parts",),
    ),
)
