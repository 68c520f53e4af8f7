"""An object in another process, with several calls at a time."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.waiting import until

from headrace.errors import BadResultError, WorkerDiedError
from headrace.processes.actor import ActorProcess
from headrace.processes.portable import UnsendableError

ROOT = Path(__file__).resolve().parents[2]


class OnlyThere:
    """Cannot be rebuilt where it arrives."""

    def __reduce__(self) -> object:
        return (_refuse, (os.getpid(),))


def _refuse(process: int) -> OnlyThere:
    if process != os.getpid():
        raise ValueError("not here")
    return OnlyThere()


class Target:
    """What the process holds."""

    def __init__(self, started: str = "") -> None:
        if started == "badly":
            raise ValueError("no such thing")
        self._met = asyncio.Event()

    async def meet(self) -> str:
        """Answer when `go` is called."""
        await self._met.wait()
        return "met"

    async def go(self) -> None:
        """Let `meet` answer."""
        self._met.set()

    async def process(self) -> tuple[int, str | None, set[int]]:
        """Process, an environment variable and the cores."""
        return os.getpid(), os.environ.get("ACTOR_TEST"), set(os.sched_getaffinity(0))

    async def fail(self) -> None:
        """Raise."""
        raise KeyError("missing")

    async def give(self, value: object) -> object:
        """The value."""
        return value

    async def only_there(self) -> object:
        """What cannot arrive."""
        return OnlyThere()

    async def start_sleeper(self) -> int:
        """A process of this process."""
        return subprocess.Popen(["sleep", "600"]).pid  # noqa: ASYNC220

    async def die(self) -> None:
        """Be killed."""
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture
def actor() -> Iterator[ActorProcess]:
    actor = ActorProcess(Target, environment={"ACTOR_TEST": "yes"}, cores={min(os.sched_getaffinity(0))})
    yield actor
    actor.kill()


def gone(process: int) -> bool:
    try:
        return "\nState:\tZ" in Path(f"/proc/{process}/status").read_text()
    except FileNotFoundError:
        return True


def wait_until_gone(process: int) -> None:
    until(lambda: gone(process))


def test_calls_are_answered_in_any_order(actor: ActorProcess) -> None:
    met = actor.call("meet")
    assert actor.call("go").result() is None
    assert met.result() == "met"


def test_it_has_its_environment_and_its_cores(actor: ActorProcess) -> None:
    process, variable, cores = actor.call("process").result()
    assert process != os.getpid()
    assert variable == "yes"
    assert cores == {min(os.sched_getaffinity(0))}


def test_an_error_or_an_answer_that_cannot_arrive_fails_its_call_alone(actor: ActorProcess) -> None:
    waiting = actor.call("meet")
    with pytest.raises(KeyError, match="missing"):
        actor.call("fail").result()
    with pytest.raises(UnsendableError, match="lock"):
        actor.call("give", threading.Lock()).result()
    with pytest.raises(BadResultError, match="not here"):
        actor.call("only_there").result()
    with pytest.raises(AttributeError, match="nothing"):
        actor.call("nothing").result()
    actor.call("go")
    assert waiting.result() == "met"


def test_a_death_fails_all_calls_those_that_come_later_too(actor: ActorProcess) -> None:
    waiting = actor.call("meet")
    with pytest.raises(WorkerDiedError, match="SIGKILL"):
        actor.call("die").result()
    with pytest.raises(WorkerDiedError, match="SIGKILL"):
        waiting.result()
    with pytest.raises(WorkerDiedError, match="SIGKILL"):
        actor.call("go").result()
    assert actor.ended is not None


def test_an_object_that_cannot_be_made_fails_every_call() -> None:
    actor = ActorProcess(Target, "badly")
    for _ in range(2):
        with pytest.raises(ValueError, match="no such thing"):
            actor.call("go").result()
    actor.kill()


def test_a_kill_ends_its_own_processes_too(actor: ActorProcess) -> None:
    sleeper = actor.call("start_sleeper").result()
    waiting = actor.call("meet")
    actor.kill()
    wait_until_gone(sleeper)
    with pytest.raises(WorkerDiedError):
        waiting.result()


def test_it_ends_when_its_parent_is_killed() -> None:
    code = (
        "import time; from headrace.processes.actor import ActorProcess; "
        "from tests.integration.test_actor_process import Target; "
        "print(ActorProcess(Target).call('process').result()[0], flush=True); time.sleep(600)"
    )
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment)
    assert parent.stdout is not None
    with parent.stdout:
        process = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    wait_until_gone(process)
