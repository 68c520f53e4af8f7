"""A stand-in of the Hugging Face Hub on loopback: its HTTP API as huggingface_hub uses it, with faults on demand."""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import json
import socket
import threading
import time
import urllib.parse
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path, PurePosixPath
from typing import Any

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
    history: list[str] = field(default_factory=list)
    """Commits made by clients, the newest last."""

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

    def __init__(self, listening: socket.socket | None = None) -> None:
        super().__init__(("127.0.0.1", 0), _Handler, bind_and_activate=listening is None)
        if listening is not None:
            self.socket.close()
            self.socket, self.server_port = listening.dup(), listening.getsockname()[1]
        self.repositories: dict[str, Repository] = {}
        self.faults = Faults()
        self.token = "hf_right"
        self.requests: list[str] = []
        """Method and path of each request."""
        self.sent: Counter[str] = Counter()
        """Bytes sent of each file, by its digest."""
        self.refused_commits = 0
        """How many commits of clients will fail."""
        self.large: dict[str, bytes] = {}
        """Contents of uploaded large files, by their digests."""
        self.asked: Counter[str] = Counter()
        """How often the content of each file was asked for, by its path."""
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def repository(self, name: str) -> Repository:
        """A model by its name, or a dataset by `datasets/` and its name."""
        return self.repositories.setdefault(name, Repository())

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that was killed is no error here."""


@contextlib.contextmanager
def running_hub(listening: socket.socket | None = None) -> Iterator[Hub]:
    """A hub that runs while the block does, at an address of its own if it is given none."""
    with Hub(listening) as hub:
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

    def do_POST(self) -> None:
        self._answer()

    def do_PUT(self) -> None:
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
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        if (general := self._general(parts, body)) is not None:
            return general()
        is_api = parts[0] == "api"
        parts = parts[2:] if parts[:2] == ["api", "models"] else parts[is_api:]
        length = 3 if parts[0] == "datasets" else 2
        name, rest = "/".join(parts[:length]), parts[length:]
        found = hub.repositories.get(name)
        if found is None or (found.private and not self._is_known()):
            return self._refuse(401 if not self._has_token() else 404, "RepoNotFound", "Repository not found")
        if self._has_token() and not self._is_known():
            return self._refuse(401, "", "Invalid credentials in Authorization header")
        return self._api(name, found, rest, body) if is_api else self._resolve(name, found, rest)

    def _general(self, parts: list[str], body: bytes) -> Callable[[], None] | None:
        """The answer to a request that is about no repository."""
        if self.command == "PUT":
            self.server.large[_etag(body)] = body
            return functools.partial(self._json, {})
        if parts[:2] == ["api", "whoami-v2"] or parts == ["api", "repos", "create"]:
            return functools.partial(self._account, body)
        if parts[-2:] == ["objects", "batch"]:
            return functools.partial(self._offer, json.loads(body))
        return None

    def _has_token(self) -> bool:
        return "authorization" in self.headers

    def _is_known(self) -> bool:
        return self.headers.get("authorization") == f"Bearer {self.server.token}"

    def _account(self, body: bytes) -> None:
        """Who the client is, or a new repository."""
        if not self._is_known():
            return self._refuse(401, "", "Invalid username or password.")
        if self.command == "GET":
            return self._json({"type": "user", "name": "me"})
        asked = json.loads(body)
        name = f"{asked['type']}s/{asked['organization'] or 'me'}/{asked['name']}"
        if name in self.server.repositories:
            return self._json({"error": "You already created it", "url": f"{self.server.url}/{name}"}, 409)
        self.server.repository(name).private = asked.get("visibility") == "private"
        self.server.repository(name).commit({".gitattributes": b""})
        return self._json({"url": f"{self.server.url}/{name}"})

    def _offer(self, asked: dict[str, Any]) -> None:
        """Where to put large files; nothing for those that are there."""
        hub = self.server
        for one in asked["objects"]:
            if one["oid"] not in hub.large:
                one["actions"] = {"upload": {"href": f"{hub.url}/put/{one['oid']}"}}
        return self._json({"transfer": "basic", "objects": asked["objects"]})

    def _commit(self, name: str, found: Repository, branch: str, body: bytes) -> None:
        """A commit of a client, if nothing has changed since it looked."""
        lines = [json.loads(line) for line in body.splitlines()]
        parent = lines[0]["value"].get("parentCommit")
        if self.server.refused_commits:
            self.server.refused_commits -= 1
            return self._refuse(500, "", "Internal error")
        if parent is not None and parent != found.branches[branch]:
            return self._refuse(412, "", "A commit has happened since. Please refresh and try again.")
        files = dict(found.commits[found.branches[branch]])
        for line in lines[1:]:
            value = line["value"]
            if line["key"] == "deletedFile":
                del files[value["path"]]
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.server.large[value["oid"]]
            else:
                files[value["path"]] = base64.b64decode(value["content"])
        commit = found.commit(files, branch)
        found.history.append(commit)
        return self._json(
            {"success": True, "commitOid": commit, "commitUrl": f"{self.server.url}/{name}/commit/{commit}"}
        )

    def _api(self, name: str, found: Repository, rest: list[str], body: bytes = b"") -> None:
        if rest and rest[0] == "auth-check":
            known = self._is_known() or rest[1:] != ["write"]
            return self._json({}) if known else self._refuse(403, "", "You do not have write access")
        revision = rest[1] if rest else "main"
        commit = found.branches.get(revision, revision)
        if commit not in found.commits:
            return self._refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        files = found.commits[commit]
        if rest and rest[0] == "commit":
            return self._commit(name, found, revision, body)
        if rest and rest[0] == "preupload":
            asked = [one["path"] for one in json.loads(body)["files"]]
            return self._json({"files": [self._mode(path, files.get(path)) for path in asked]})
        if rest and rest[0] == "paths-info":
            form = urllib.parse.parse_qs(body.decode())
            asked = json.loads(body)["paths"] if body.startswith(b"{") else form.get("paths", [])
            return self._json([entry for path in asked for entry in self._paths(files, path)])
        if rest and rest[0] == "tree":
            time.sleep(self.server.faults.tree_wait_s)
            folder = "/".join(rest[2:])
            if "recursive=true" in self.path.lower() or "recursive=1" in self.path or not folder:
                below = {path: data for path, data in files.items() if not folder or path.startswith(f"{folder}/")}
                folders = {str(parent) for path in below for parent in PurePosixPath(path).parents} - {".", folder}
                entries = [self._entry(path, data) for path, data in below.items()]
                return self._json([*entries, *({"type": "directory", "path": one, "oid": "0"} for one in folders)])
            names = {
                path.removeprefix(f"{folder}/").partition("/")[0] for path in files if path.startswith(f"{folder}/")
            }
            if not names:
                return self._refuse(404, "EntryNotFound", f"{folder} does not exist")
            return self._json([entry for one in sorted(names) for entry in self._paths(files, f"{folder}/{one}")])
        siblings = [{"rfilename": path} for path in files]
        gated = "manual" if found.gated else False
        return self._json(
            {"id": name.removeprefix("datasets/"), "modelId": name, "sha": commit, "siblings": siblings, "gated": gated}
        )

    def _entry(self, path: str, data: bytes) -> dict[str, object]:
        entry: dict[str, object] = {"type": "file", "path": path, "size": self._size(path, data), "oid": _sha1(data)}
        if _is_large(path):
            entry["lfs"] = {"oid": _etag(data), "size": self._size(path, data), "pointerSize": 130}
        return entry

    def _paths(self, files: Mapping[str, bytes], path: str) -> list[dict[str, object]]:
        if path in files:
            return [self._entry(path, files[path])]
        is_folder = any(other.startswith(f"{path}/") for other in files)
        return [{"type": "directory", "path": path, "oid": "0"}] if is_folder else []

    def _mode(self, path: str, data: bytes | None) -> dict[str, object]:
        mode = "lfs" if _is_large(path) else "regular"
        oid = None if data is None else _etag(data) if _is_large(path) else _sha1(data)
        return {"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": oid}

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
        start, end = 0, len(data)
        if (asked := self.headers.get("range", "")).startswith("bytes="):
            first, _, last = asked.removeprefix("bytes=").partition("-")
            start, end = int(first), min(int(last) + 1, len(data)) if last else len(data)
        self.send_response(206 if asked else 200)
        self.send_header("Content-Length", str(self._size(path, data) - start - (len(data) - end)))
        if asked:
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{self._size(path, data)}")
        self.send_header("ETag", f'"{_etag(data) if _is_large(path) else _sha1(data)}"')
        self.send_header("X-Repo-Commit", commit)
        self.send_header("Accept-Ranges", "bytes")
        if _is_large(path):
            self.send_header("X-Linked-Size", str(self._size(path, data)))
            self.send_header("X-Linked-Etag", f'"{_etag(data)}"')
        self.end_headers()
        if self.command == "GET":
            self._send(path, data[:end], start)

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
        if self.command != "HEAD":
            self.wfile.write(body)

    def _json(self, value: object, status: int = 200) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def _is_large(path: str) -> bool:
    return path.endswith((".safetensors", ".bin", ".onnx", ".parquet"))


@functools.cache
def _etag(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@functools.cache
def _sha1(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
