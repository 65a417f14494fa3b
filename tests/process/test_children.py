"""One child of a cluster: how it is started, ended, frozen, and how it ends when nobody ends it."""

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from localai_dist.errors import UserMistake
from localai_dist.testing.child import Child, ChildFailed, child_environment, end_all
from localai_dist.testing.cluster import Cluster, ClusterFailed, Plan
from localai_dist.testing.state import State, StateUnusable, wipe
from localai_dist.testing.waiting import NeverCame, until
from tests.process.kit import living

SLEEPER = "import time; print('up', flush=True); time.sleep(600)"
STUBBORN = "import signal, time; signal.signal(15, lambda *_: None); print('up', flush=True)\nwhile True: time.sleep(1)"


def make(folder: Path, code: str, name: str = "child") -> Child:
    """A child that runs ``code``."""
    return Child(name, [sys.executable, "-c", code], child_environment({}), folder, folder / f"{name}.log")


@pytest.fixture
def child(tmp_path: Path) -> Iterator[Child]:
    """A running child."""
    made = make(tmp_path, SLEEPER)
    made.start()
    until("its first line", lambda: made.tail() == ["up"], 10)
    yield made
    made.kill()


def test_a_zombie_counts_as_dead(child: Child) -> None:
    """A child that was killed and not yet reaped is dead."""
    os.kill(child.pid, signal.SIGKILL)
    until("its death", lambda: not child.is_alive(), 5)
    assert child.exit_code == -signal.SIGKILL
    assert "by signal 9: up" in child.obituary()


def test_the_log_is_appended(child: Child) -> None:
    """A restart writes on where the last run ended."""
    child.kill()
    child.start()
    until("the second line", lambda: child.tail() == ["up", "up"], 10)
    assert child.log.stat().st_mode & 0o777 == 0o600


def test_started_once(child: Child) -> None:
    """A running child is not started a second time."""
    with pytest.raises(ChildFailed, match="runs already"):
        child.start()


def test_freeze_and_thaw(child: Child) -> None:
    """A frozen child stands still and ends by a polite signal all the same."""
    child.freeze()
    assert child.is_alive()
    child.thaw()
    child.freeze()
    child.terminate()
    assert child.wait_ended(5) == -signal.SIGTERM


def test_a_stubborn_child_is_killed(tmp_path: Path) -> None:
    """A child that ignores SIGTERM ends within the two bounds and no later (WALK-3)."""
    made = make(tmp_path, STUBBORN)
    made.start()
    until("its first line", lambda: made.tail() == ["up"], 10)
    end_all([made], polite=0.3, insist=0.3)
    assert made.exit_code == -signal.SIGKILL


def test_waiting_names_what_did_not_come(child: Child) -> None:
    """A wait that is over says for what."""
    with pytest.raises(NeverCame, match=r"the end of child did not come within 0\.1 s"):
        child.wait_ended(0.1)


def test_a_child_that_is_needed_and_gone_ends_the_waiting(tmp_path: Path) -> None:
    """A daemon that ended before anybody waited for it is told at once, not after the bound (WALK-2)."""
    gone, stays = make(tmp_path, "print('no use')", "gone"), make(tmp_path, SLEEPER, "stays")
    for child in (gone, stays):
        child.start()
    try:
        gone.wait_ended(20)
        cluster = Cluster(Plan(state=tmp_path / "state"))
        with pytest.raises(ClusterFailed, match=r"while waiting for both: gone \(pid .* exit code 0: no use"):
            cluster.wait_for("both", lambda: None, 30, needed=[stays, gone])
    finally:
        stays.kill()


def test_nothing_yet_is_no_fact() -> None:
    """A wait for rows or lines goes on while there are none."""
    answers = iter([[], [], ["row"], ["more"]])
    assert until("a row", lambda: next(answers), 5) == ["row"]
    for nothing in ([], "", 0, {}):
        with pytest.raises(NeverCame):
            until("nothing", lambda: nothing, 0.01)  # noqa: B023


def test_what_cannot_be_started_is_named(tmp_path: Path) -> None:
    """A program that is not there ends at once, and its log says why."""
    made = Child("odd", ["/no/such/program"], child_environment({}), tmp_path, tmp_path / "odd.log")
    made.start()
    assert made.wait_ended(10) != 0
    assert "/no/such/program" in "\n".join(made.tail())


def test_children_end_with_their_parent(tmp_path: Path) -> None:
    """The parent SIGKILLed: its children end by themselves, frozen ones too (WALK-3)."""
    parent = textwrap.dedent(
        f"""
        import sys, time
        from pathlib import Path
        from tests.process.test_children import SLEEPER, STUBBORN, make, until
        folder = Path({str(tmp_path)!r})
        made = [make(folder, SLEEPER, "a"), make(folder, STUBBORN, "b")]
        for child in made:
            child.start()
            until("its line", lambda: child.tail() == ["up"], 10)
        made[0].freeze()
        print(*(child.pid for child in made), flush=True)
        time.sleep(600)
        """
    )
    with subprocess.Popen(
        [sys.executable, "-c", parent], env=child_environment({}), stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        pids = {int(word) for word in process.stdout.readline().split()}
        assert len(living(pids)) == 2
        process.kill()
    until("the children's end", lambda: not living(pids), 5)


def test_nothing_of_ours_leaks_into_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child's environment has what it was given, nothing LOCALAI of the shell that started the cluster (WALK-8)."""
    monkeypatch.setenv("LOCALAI_NATS_URL", "nats://x")
    monkeypatch.setenv("LOCALAI_ADDRESS", ":1")
    made = child_environment({"LOCALAI_ADDRESS": ":2"})
    assert {name: made[name] for name in made if name.startswith("LOCALAI_")} == {"LOCALAI_ADDRESS": ":2"}
    assert made["PYTHONPATH"].split(os.pathsep)[0] == str(Path(__file__).resolve().parents[2])


def test_wipe_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wipe empties a folder inside its base, and refuses an empty base, the root, and a folder outside."""
    inside = tmp_path / "base" / "data"
    inside.mkdir(parents=True)
    (inside / "file").write_text("x")
    (inside / "sub").mkdir()
    monkeypatch.chdir(inside)
    for base in (Path(""), Path("/"), tmp_path / "other", inside):
        with pytest.raises(UserMistake, match="refusing"):
            wipe(inside, base)
    assert (inside / "file").exists()
    wipe(inside, tmp_path / "base")
    assert list(inside.iterdir()) == []


def test_a_state_folder_has_one_holder(tmp_path: Path) -> None:
    """A second cluster on the same folder is refused by name; secrets are kept, and private (WALK-3, WALK-23)."""
    first, second = State(tmp_path / "s"), State(tmp_path / "s")
    first.open()
    made = first.secrets()
    with pytest.raises(StateUnusable, match=rf"another cluster \(pid {os.getpid()}\).*--state"):
        second.open()
    first.close()
    second.open()
    assert second.secrets() == made
    assert (tmp_path / "s/secrets.json").stat().st_mode & 0o777 == 0o600
    second.close()
