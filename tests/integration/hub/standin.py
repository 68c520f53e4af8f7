"""A stand-in of the Hugging Face Hub on loopback: its HTTP API as huggingface_hub uses it, with faults on demand."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import threading
import time
import urllib.parse
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

_BLOCK = 1 << 16


@dataclass(slots=True)
class Faults:
    """What is wrong with the hub. All are off at first, and may be changed while it runs."""

    wait_s: float = 0.0
    """Before each answer."""
    tree_wait_s: float = 0.0
    """Before each listing of files."""
    block_s: float = 0.0
    """After each 64 kB of a file."""
    cut_after: int | None = None
    """Bytes of a file after which the connection is cut, on the first `cuts` downloads."""
    cuts: int = 0
    stall_s: float = 0.0
    """Before the connection is cut."""
    longer: int = 0
    """Bytes by which the stated sizes of weights exceed the real ones."""
    gone_after: int | None = None
    """Bytes of files after which everything is 404."""
    status: int | None = None
    """Status of every answer."""
    code: str = ""
    """The header X-Error-Code beside it."""
    message: str = ""
    """The header X-Error-Message beside it."""


@dataclass(slots=True)
class Repository:
    """A repository: commits of files, and branches."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    gated: bool = False
    private: bool = False

    def commit(self, files: Mapping[str, bytes], branch: str = "main") -> str:
        """Put files on a branch as its newest commit; returns the commit."""
        digest = hashlib.sha1(repr(sorted((name, _etag(data)) for name, data in files.items())).encode())
        digest.update(str(len(self.commits)).encode())
        self.commits[digest.hexdigest()] = dict(files)
        self.branches[branch] = digest.hexdigest()
        return digest.hexdigest()

    def commit_folder(self, folder: Path, branch: str = "main", **more: bytes) -> str:
        """Put a folder on a branch."""
        files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        return self.commit({**files, **more}, branch)


class Hub(ThreadingHTTPServer):
    """The server."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories: dict[str, Repository] = {}
        self.faults = Faults()
        self.token = "hf_right"
        self.requests: list[str] = []
        """Method and path of each request."""
        self.sent: Counter[str] = Counter()
        """Bytes sent of each file, by its digest."""
        self.asked: Counter[str] = Counter()
        """How often the content of each file was asked for, by its path."""
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def repository(self, name: str) -> Repository:
        return self.repositories.setdefault(name, Repository())

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that was killed is no error here."""


@contextlib.contextmanager
def running_hub() -> Iterator[Hub]:
    """A hub that runs while the block does."""
    with Hub() as hub:
        thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class names it so
        """Nothing."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        hub, faults = self.server, self.server.faults
        with hub.lock:
            hub.requests.append(f"{self.command} {self.path}")
        time.sleep(faults.wait_s)
        if faults.status is not None:
            return self._refuse(faults.status, faults.code, faults.message)
        if faults.gone_after is not None and hub.sent.total() >= faults.gone_after:
            return self._refuse(404, "RepoNotFound", "Repository not found")
        parts = [urllib.parse.unquote(part) for part in urllib.parse.urlsplit(self.path).path.strip("/").split("/")]
        if parts[:2] == ["api", "models"]:
            name, rest, serve = "/".join(parts[2:4]), parts[4:], self._api
        else:
            name, rest, serve = "/".join(parts[:2]), parts[2:], self._resolve
        found = hub.repositories.get(name)
        if found is None or (found.private and not self._is_known()):
            return self._refuse(401 if not self._has_token() else 404, "RepoNotFound", "Repository not found")
        if self._has_token() and not self._is_known():
            return self._refuse(401, "", "Invalid credentials in Authorization header")
        return serve(name, found, rest)

    def _has_token(self) -> bool:
        return "authorization" in self.headers

    def _is_known(self) -> bool:
        return self.headers.get("authorization") == f"Bearer {self.server.token}"

    def _api(self, name: str, found: Repository, rest: list[str]) -> None:
        revision = rest[1] if rest else "main"
        commit = found.branches.get(revision, revision)
        if commit not in found.commits:
            return self._refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        files = found.commits[commit]
        if rest and rest[0] == "tree":
            time.sleep(self.server.faults.tree_wait_s)
            return self._json([self._entry(path, data) for path, data in files.items()])
        siblings = [{"rfilename": path} for path in files]
        gated = "manual" if found.gated else False
        return self._json({"id": name, "modelId": name, "sha": commit, "siblings": siblings, "gated": gated})

    def _entry(self, path: str, data: bytes) -> dict[str, object]:
        entry: dict[str, object] = {"type": "file", "path": path, "size": self._size(path, data), "oid": _sha1(data)}
        if _is_large(path):
            entry["lfs"] = {"oid": _etag(data), "size": self._size(path, data), "pointerSize": 130}
        return entry

    def _size(self, path: str, data: bytes) -> int:
        return len(data) + (self.server.faults.longer if _is_large(path) else 0)

    def _resolve(self, name: str, found: Repository, rest: list[str]) -> None:
        revision, path = rest[1], "/".join(rest[2:])
        commit = found.branches.get(revision, revision)
        if commit not in found.commits:
            return self._refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        if found.gated and not self._is_known():
            return self._refuse(401 if not self._has_token() else 403, "GatedRepo", f"Access to {name} is restricted")
        data = found.commits[commit].get(path)
        if data is None:
            return self._refuse(404, "EntryNotFound", "Entry not found")
        return self._file(commit, path, data)

    def _file(self, commit: str, path: str, data: bytes) -> None:
        start = 0
        if (asked := self.headers.get("range", "")).startswith("bytes="):
            start = int(asked.removeprefix("bytes=").partition("-")[0])
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(self._size(path, data) - start))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{self._size(path, data)}")
        self.send_header("ETag", f'"{_etag(data) if _is_large(path) else _sha1(data)}"')
        self.send_header("X-Repo-Commit", commit)
        self.send_header("Accept-Ranges", "bytes")
        if _is_large(path):
            self.send_header("X-Linked-Size", str(self._size(path, data)))
            self.send_header("X-Linked-Etag", f'"{_etag(data)}"')
        self.end_headers()
        if self.command == "GET":
            self._send(path, data, start)

    def _send(self, path: str, data: bytes, start: int) -> None:
        hub, faults = self.server, self.server.faults
        with hub.lock:
            hub.asked[path] += 1
        for place in range(start, len(data), _BLOCK):
            block = data[place : place + _BLOCK]
            if faults.cuts > 0 and faults.cut_after is not None and place + len(block) > faults.cut_after:
                faults.cuts -= 1
                time.sleep(faults.stall_s)
                self.close_connection = True
                self.connection.close()
                return
            if faults.gone_after is not None and hub.sent.total() >= faults.gone_after:
                self.close_connection = True
                self.connection.close()
                return
            self.wfile.write(block)
            with hub.lock:
                hub.sent[_etag(data)] += len(block)
            if faults.block_s:
                time.sleep(faults.block_s)
        if faults.longer and _is_large(path):
            self.close_connection = True

    def _refuse(self, status: int, code: str, message: str) -> None:
        body = json.dumps({"error": message}).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        for name, value in (("X-Error-Code", code), ("X-Error-Message", message)):
            if value:
                self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def _json(self, value: object) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def _is_large(path: str) -> bool:
    return path.endswith((".safetensors", ".bin", ".onnx"))


@functools.cache
def _etag(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@functools.cache
def _sha1(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
