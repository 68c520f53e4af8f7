"""A PostgreSQL server of its own, on loopback."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

USER = "headrace"


def programs() -> Path | None:
    """The folder of the server's programs; None if it is not installed."""
    folders = [*sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)]
    if found := os.environ.get("HEADRACE_TEST_POSTGRES") or shutil.which("initdb"):
        folders.insert(0, Path(found) if Path(found).is_dir() else Path(found).parent)
    return next((folder for folder in folders if (folder / "initdb").exists()), None)


class Server:
    """The server. It can be stopped and started again."""

    def __init__(self, folder: Path) -> None:
        found = programs()
        assert found is not None, "asked for where it is installed"
        self._programs = found
        self._data = folder / "data"
        self._user = "postgres" if os.geteuid() == 0 else None  # it refuses to run as root
        if self._user:
            shutil.chown(folder, self._user)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]
        self._run("initdb", "-D", str(self._data), "-U", USER, "-A", "trust", "--no-sync")

    @property
    def url(self) -> str:
        """Its address, with a password that must not be shown anywhere."""
        return self.url_of("postgres")

    def url_of(self, database: str) -> str:
        """The address of one of its databases."""
        return f"postgresql://{USER}:s3cret@127.0.0.1:{self.port}/{database}"

    def start(self) -> None:
        """Start it, without syncing to the disk."""
        options = f"-p {self.port} -k {self._data} -F -c listen_addresses=127.0.0.1"
        self._run("pg_ctl", "-D", str(self._data), "-l", str(self._data / "log"), "-o", options, "-w", "start")

    def add_pgvector(self) -> bool:
        """Make a database `vectors` with pgvector, if that is installed; returns whether it is."""
        import psycopg

        known = "SELECT 1 FROM pg_available_extensions WHERE name = 'vector'"
        with psycopg.connect(self.url, autocommit=True) as connection:
            if not connection.execute(known).fetchall():
                return False
            connection.execute("CREATE DATABASE vectors")
        with psycopg.connect(self.url_of("vectors")) as connection:
            connection.execute("CREATE EXTENSION vector")
        return True

    def stop(self) -> None:
        """Stop it; connections are cut."""
        self._run("pg_ctl", "-D", str(self._data), "-m", "immediate", "-w", "stop")

    def _run(self, program: str, *arguments: str) -> None:
        subprocess.run(
            [str(self._programs / program), *arguments],
            check=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            user=self._user,
            cwd="/",
        )


@contextlib.contextmanager
def running() -> Iterator[Server]:
    """A server that runs within the block."""
    with tempfile.TemporaryDirectory(prefix="headrace-postgres-", dir="/tmp") as folder:
        server = Server(Path(folder))
        server.start()
        try:
            yield server
        finally:
            with contextlib.suppress(subprocess.CalledProcessError):  # a test may have stopped it
                server.stop()
