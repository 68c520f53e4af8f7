"""API keys of a server: refused at the start, told where they are missing, and changed while it runs."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from pathlib import Path

import httpx
import pytest
from tests.acceptance.command import FAKE, headrace, lines_of, start, traced
from tests.acceptance.serving.process import port_of_ours, wait_until_ready
from tests.waiting import until

MODELS = """
models:
  - {name: one, engine: "headrace.testing:FakeEngine"}
  - {name: two, engine: "headrace.testing:FakeEngine"}
"""


class Told:
    """What a process says, read as it comes."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.lines: list[str] = []
        assert process.stderr is not None
        self._stream = process.stderr
        self.reading = threading.Thread(target=self._read, daemon=True)
        self.reading.start()

    def _read(self) -> None:
        self.lines.extend(iter(self._stream.readline, ""))

    def has(self, words: str) -> bool:
        return any(words in line for line in self.lines)


@pytest.mark.parametrize("value", ["", ",", "  "])
@pytest.mark.parametrize("config", [False, True])
def test_a_variable_without_a_key_opens_no_server(tmp_path: Path, value: str, config: bool) -> None:
    (tmp_path / "models.yaml").write_text(MODELS)
    served = ("--config", "models.yaml") if config else FAKE
    status, said = headrace("serve", "--port", "0", *served, folder=tmp_path, HEADRACE_API_KEYS=value)
    assert status == 2
    assert "HEADRACE_API_KEYS is set but holds no key" in said
    assert len(lines_of(said)) == 1


@pytest.mark.parametrize(
    "flags", [("--api-key-file", "a", "--api-key-file", "b"), ("--ssl-keyfile", "a", "--ssl-keyfile", "b")]
)
def test_a_flag_of_access_given_twice_is_refused(tmp_path: Path, flags: tuple[str, ...]) -> None:
    for name in ("a", "b"):
        (tmp_path / name).write_text(f"key-{name}")
    status, said = headrace("serve", "--port", "0", *FAKE, *flags, folder=tmp_path)
    assert status == 2
    assert f"{flags[0]} is given twice" in said


@pytest.mark.parametrize(
    ("host", "key", "warned"), [("0.0.0.0", None, True), ("0.0.0.0", "k1", False), ("127.0.0.1", None, False)]
)
def test_a_server_open_to_everyone_is_told(tmp_path: Path, host: str, key: str | None, warned: bool) -> None:
    variables = {} if key is None else {"HEADRACE_API_KEYS": key}
    with port_of_ours() as port:
        command = ("serve", "--quiet", "--port", str(port), "--host", host, *FAKE)
        # The place of the test is on loopback, so the server may listen on the same port of all addresses.
        with traced(start(*command, folder=tmp_path, **variables)) as process:
            told = Told(process)
            wait_until_ready(process, f"http://127.0.0.1:{port}")
            headers = {"host": "evil.com", "authorization": f"Bearer {key}"}
            answer = httpx.get(f"http://127.0.0.1:{port}/v1/models", headers=headers, timeout=60)
            # Where nothing else keeps web pages out, the name does.
            assert answer.status_code == (400 if host == "127.0.0.1" else 200)
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
            told.reading.join()  # to the end: with --quiet nothing says that it stops
            assert told.has(f"WARNING: --host {host} without API keys") == warned


@pytest.mark.parametrize("config", [False, True])
def test_keys_change_while_the_server_runs(tmp_path: Path, config: bool) -> None:
    (tmp_path / "models.yaml").write_text(MODELS)
    served = ("--config", "models.yaml") if config else FAKE
    path = tmp_path / "keys"
    path.write_text("alice k1\n")
    with port_of_ours() as port:
        url = f"http://127.0.0.1:{port}"
        command = ("serve", "--port", str(port), "--api-key-file", "keys", *served)
        with traced(start(*command, folder=tmp_path)) as process, httpx.Client(base_url=url, timeout=60) as client:
            told = Told(process)
            wait_until_ready(process, url)

            def opens(key: str) -> bool:
                headers = {"authorization": f"Bearer {key}"} if key else {}
                return client.get("/v1/models", headers=headers).status_code == 200

            def replace(text: str) -> None:
                (tmp_path / "next").write_text(text)
                (tmp_path / "next").rename(path)

            assert [opens(key) for key in ("k1", "k2")] == [True, False]
            replace("alice k2\n")
            until(lambda: opens("k2"))
            assert not opens("k1")
            until(lambda: told.has("read 1 API keys"))

            for text, words in (("alice k3 per_hour=1\n", "per_hour=1"), ("# none\n", "holds no key")):
                replace(text)
                until(lambda words=words: told.has(words))  # type: ignore[misc]
                assert [opens(key) for key in ("k2", "k3", "")] == [True, False, False]
            path.unlink()
            until(lambda: told.has("cannot read API key file"))
            assert [opens(key) for key in ("k2", "")] == [True, False]
            assert sum("stay valid" in line for line in told.lines) == 3  # each once

            replace("bob k4\n")
            process.send_signal(signal.SIGHUP)  # at once, and the process lives
            until(lambda: opens("k4"))
            assert not opens("k2")
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_a_file_that_may_not_be_read_keeps_the_keys(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("alice k1\n")
    with port_of_ours() as port:
        url = f"http://127.0.0.1:{port}"
        command = ("serve", "--port", str(port), "--api-key-file", "keys", *FAKE)
        with traced(start(*command, folder=tmp_path)) as process:
            told = Told(process)
            wait_until_ready(process, url)
            path.chmod(0)
            until(lambda: told.has("cannot read API key file"))
            headers = {"authorization": "Bearer k1"}
            assert httpx.get(f"{url}/v1/models", headers=headers, timeout=60).status_code == 200
