"""Logs, the lifecycle table, the scrubbed environment, galleries, readings."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from localai_dist.ids import ProcessKey
from localai_dist.units import KiB
from localai_dist.worker.environment import backend_environment
from localai_dist.worker.errors import InstallFailed
from localai_dist.worker.gallery import Entry, Gallery, choose, parse_galleries, parse_index
from localai_dist.worker.lifecycle import TRANSITIONS, IllegalInput, Input, State, step
from localai_dist.worker.logs import KEYS_KEPT, LINE_BYTES, LINES_KEPT, LineCutter, LogLine, LogStore
from localai_dist.worker.readings import Readings, parse_meminfo

M0, M1 = ProcessKey("m", 0), ProcessKey("m", 1)


def line(text: str, when: str = "2026-01-01T00:00:00Z") -> LogLine:
    return LogLine(when, "stderr", text)


class LineCutterTests(SynchronousTestCase):
    @given(st.lists(st.text(alphabet="ab ", max_size=5), max_size=8), st.lists(st.integers(1, 7), max_size=20))
    def test_chunking_is_invisible(self, lines: list[str], cuts: list[int]) -> None:
        """However the bytes are cut up, the same lines come out."""
        whole = "".join(text + "\n" for text in lines).encode()
        cutter, got = LineCutter(), []
        for size in itertools.chain(cuts, [max(1, len(whole))]):
            got += cutter.feed(whole[:size])
            whole = whole[size:]
        self.assertEqual(got + cutter.finish(), lines)

    def test_bounded(self) -> None:
        """A line without an end is cut, so that no backend can fill the memory."""
        cutter = LineCutter()
        self.assertEqual([len(text) for text in cutter.feed(b"x" * (2 * LINE_BYTES + 5))], [LINE_BYTES, LINE_BYTES])
        self.assertEqual(cutter.finish(), ["x" * 5])


class LogStoreTests(SynchronousTestCase):
    def test_ring(self) -> None:
        """The last thousand lines of a process are kept."""
        logs = LogStore()
        for number in range(LINES_KEPT + 1):
            logs.append(M0, line(str(number)))
        self.assertEqual([len(logs.lines("m#0") or []), (logs.lines("m#0") or [])[0].text], [LINES_KEPT, "1"])
        self.assertEqual(logs.tail(M0, 2), ["999", "1000"])
        self.assertEqual(logs.tail(M0, 2, "stdout"), [])

    def test_replicas_are_merged_by_time(self) -> None:
        """A model's name gives the lines of all its replicas in the order they were written."""
        logs = LogStore()
        logs.append(M1, line("second", "2"))
        logs.append(M0, line("first", "1"))
        self.assertEqual([one.text for one in logs.lines("m") or []], ["first", "second"])
        self.assertEqual(logs.models(), ["m"])
        self.assertIsNone(logs.lines("other"))

    def test_subscription_misses_nothing(self) -> None:
        """A subscriber gets what was there and everything after, nothing twice, and nothing once it stopped."""
        logs, heard = LogStore(), []
        logs.append(M0, line("before"))
        sofar, stop = logs.subscribe(M0, lambda one: heard.append(one.text))
        logs.append(M0, line("after"))
        stop()
        stop()
        logs.append(M0, line("late"))
        self.assertEqual([[one.text for one in sofar], heard], [["before"], ["after"]])

    def test_keys_are_bounded(self) -> None:
        """Of very many processes the one that was silent longest is forgotten, unless somebody listens to it."""
        logs = LogStore()
        logs.subscribe(M0, lambda _line: None)
        for number in range(KEYS_KEPT + 5):
            logs.append(ProcessKey(f"x{number}"), line("a"))
        self.assertEqual(len(logs.models()), KEYS_KEPT)
        self.assertIsNotNone(logs.lines("m"))
        self.assertIsNone(logs.lines("x0"))


class LifecycleTests(SynchronousTestCase):
    def test_every_pair_is_decided(self) -> None:
        """Every state and input has a transition or is refused, and what is refused changes nothing."""
        for pair in itertools.product(State, Input):
            if pair in TRANSITIONS:
                self.assertIsInstance(step(*pair), State)
            else:
                self.assertRaises(IllegalInput, step, *pair)

    def test_any_process_can_end(self) -> None:
        """Whatever a process is, its end makes it gone, and gone is for ever."""
        for state in State:
            self.assertIs(step(state, Input.ENDED), State.GONE)
        self.assertEqual({to for (frm, _), to in TRANSITIONS.items() if frm is State.GONE}, {State.GONE})

    def test_a_survivor_can_be_ended_again(self) -> None:
        """A process that survived being killed keeps its place and can be told to end again (WALK-21)."""
        self.assertIs(step(State.ENDING, Input.SURVIVED), State.SURVIVING)
        self.assertIs(step(State.SURVIVING, Input.TOLD_TO_END), State.ENDING)


class EnvironmentTests(SynchronousTestCase):
    def test_scrubbed(self) -> None:
        """A backend sees the machine's settings, none of ours, and no secret but its own token (WALK-23)."""
        parent = {
            "PATH": "/bin",
            "CUDA_VISIBLE_DEVICES": "0",
            "LOCALAI_REGISTRATION_TOKEN": "r",
            "LOCALAI_NATS_URL": "nats://x",
            "NATS_URL": "nats://x",
            "LOCALAI_GRPC_AUTH_TOKEN": "somebody else's",
            "HF_TOKEN": "h",
            "AWS_SECRET_ACCESS_KEY": "s",
            "OPENAI_API_KEY": "k",
            "PGPASSWORD": "p",
            "DATABASE_URL": "postgres://x",
            "http_proxy": "http://user:pass@proxy:3128",
            "COPIED": "the value is reg-secret, copied",
            "https_proxy": "http://proxy:3128",
        }
        seen = backend_environment(parent, token="own", python="/py", secrets=("reg-secret", ""), code="/code")
        self.assertEqual(
            seen,
            {
                "PATH": "/bin",
                "CUDA_VISIBLE_DEVICES": "0",
                "https_proxy": "http://proxy:3128",
                "LOCALAI_GRPC_AUTH_TOKEN": "own",
                "LOCALAI_BACKEND_PYTHON": "/py",
                "PYTHONPATH": "/code",
            },
        )

    def test_code_comes_first(self) -> None:
        """Backends in the box run the code this worker runs."""
        seen = backend_environment({"PYTHONPATH": "lib"}, token="t", python="p", code="/code")
        self.assertEqual(seen["PYTHONPATH"], "/code:lib")


class GalleryTests(SynchronousTestCase):
    index = """
- name: llama-cpp
  alias: llama
  uri: llama_cpp
  license: MIT
- name: cpu-x
  uri: x
- name: x
  capabilities: {default: cpu-x, nvidia: cuda-x, vulkan: vulkan-x}
- name: cuda-x
  uri: y
"""

    def test_choose(self) -> None:
        """A backend is found by name, by alias, or through a meta entry by the first capability that it knows."""
        entries = parse_index(self.index, "here")
        self.assertEqual(choose(entries, "llama-cpp"), Entry("llama-cpp", "llama_cpp", "llama"))
        self.assertEqual(choose(entries, "llama"), choose(entries, "llama-cpp"))
        self.assertEqual(choose(entries, "x"), Entry("cpu-x", "x"))
        self.assertEqual(choose(entries, "x", ("amd", "default")), Entry("cpu-x", "x"))
        self.assertEqual(choose(entries, "x", ("nvidia-cuda-12", "nvidia", "default")), Entry("cuda-x", "y"))
        self.assertIsNone(choose(entries, "x", ("vulkan", "default")), "the concrete entry it names does not exist")
        self.assertIsNone(choose(entries, "nothing"))

    def test_unreadable(self) -> None:
        """An index or a list of galleries that can't be read is an error that says where."""
        for text in ("- {", "a: 1", "- uri: x", "- name: [1]"):
            with self.assertRaises(InstallFailed) as caught:
                parse_index(text, "/the/index.yaml")
            self.assertIn("/the/index.yaml", str(caught.exception))
        self.assertEqual(parse_index("", "here"), [])
        for text in ("{}", "[1]", "oops"):
            with self.assertRaises(InstallFailed):
                parse_galleries(text)
        self.assertEqual(parse_galleries(" "), [])
        self.assertEqual(parse_galleries('[{"url":"u","name":"n","mirrors":[]}]'), [Gallery("u", "n")])


class ReadingsTests(SynchronousTestCase):
    def test_meminfo(self) -> None:
        """Memory is read as the kernel tells it."""
        self.assertEqual(parse_meminfo("MemTotal: 10 kB\nMemFree: 1 kB\nMemAvailable: 4 kB\n"), (10 * KiB, 4 * KiB))
        self.assertIsNone(parse_meminfo("nothing"))

    def test_missing_is_left_out(self) -> None:
        """A reading that can't be had is left out of a beat, never told as zero."""
        self.assertEqual(Readings().to_beat(), {})
        self.assertEqual(Readings().to_register(), {"total_vram": 0, "available_vram": 0})
        self.assertEqual(Readings(disk=(10, 0)).to_beat(), {"total_disk": 10, "available_disk": 0})
