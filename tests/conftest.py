"""What holds for all tests."""

from __future__ import annotations

import gc
import os
import shutil
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

# Before any test imports torch, and for every process that a test starts. The models are tiny and three files run at a
# time: with more threads, they would mostly wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from tests import postgres as postgres_server
from tests.examples import FEW

TOGETHER = ("tests/contract/engines/", "tests/integration/cluster/")
"""Folders whose files share what takes long to make, such as exported models, or Ray: each is run by one process."""

MEMORY = Path("/dev/shm")
ROOM_BYTES = 4 << 30


def pytest_configure(config: pytest.Config) -> None:
    """Keep files in memory: thousands of jobs make theirs durable, and on a disk the tests mostly wait for that."""
    if config.option.markexpr == "not thorough":
        os.environ[FEW] = "1"
    if MEMORY.is_dir() and shutil.disk_usage(MEMORY).free >= ROOM_BYTES:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Garbage collection would visit what is imported again and again, and find nothing."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Share out files, and some folders as a whole."""
    from xdist.scheduler import LoadFileScheduling

    class Sharing(LoadFileScheduling):  # type: ignore[misc]  # it has no types
        def _split_scope(self, nodeid: str) -> str:
            return next((folder for folder in TOGETHER if nodeid.startswith(folder)), super()._split_scope(nodeid))

    return Sharing(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """What jobs find out about models is kept apart from the user's, and from what earlier runs of the tests found."""
    folder = tmp_path_factory.mktemp("cache")
    before = os.environ.get("XDG_CACHE_HOME")
    os.environ["XDG_CACHE_HOME"] = str(folder)
    yield folder
    if before is None:
        del os.environ["XDG_CACHE_HOME"]
    else:
        os.environ["XDG_CACHE_HOME"] = before


ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True, scope="module")
def nothing_left_in_the_checkout() -> Iterator[None]:
    """Tests write to temporary folders alone. Names that begin with a dot are those of tools."""
    before = set(ROOT.iterdir())
    yield
    left = sorted(one.name for one in set(ROOT.iterdir()) - before if not one.name.startswith("."))
    assert not left, f"these tests, or others that ran meanwhile, left {', '.join(left)} in {ROOT}: write to tmp_path"


@pytest.fixture(autouse=True, scope="module")
def left_out_of_collections() -> None:
    """Garbage collection need not visit what is loaded by now: in a process with all libraries, a visit takes most of a
    second, and short jobs cause many.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def postgres() -> Iterator[postgres_server.Server]:
    """A PostgreSQL server of its own."""
    pytest.importorskip("psycopg")
    if postgres_server.programs() is None:
        pytest.skip("PostgreSQL is not installed: apt-get install postgresql")
    with postgres_server.running() as server:
        yield server
