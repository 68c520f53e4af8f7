"""Jobs over servers elsewhere: what is sent, and what is said where a server is away or limits the rate."""

from __future__ import annotations

import io
import json
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, TypeVar

import pytest

import headrace
from headrace.errors import BrokenOffError, ConfigError
from headrace.events import BatchDone, Event
from headrace.observe.live.meter import Meter
from headrace.observe.live.progress import describe

ServerT = TypeVar("ServerT", bound="Recorder")
AWAY = "http://127.0.0.1:9"


class Recorder(ThreadingHTTPServer):
    """Answers each request after `limited` refusals, and keeps the bodies."""

    daemon_threads = True

    def __init__(self, limited: int) -> None:
        super().__init__(("127.0.0.1", 0), Answering)
        self.limited = limited
        self.bodies: list[dict[str, Any]] = []
        self.answer: dict[str, Any] | None = None
        self.url = f"http://127.0.0.1:{self.server_port}"

    def admits(self) -> tuple[bool, dict[str, str]]:
        """Whether a request is taken, and headers of its answer."""
        return True, {}


class Answering(BaseHTTPRequestHandler):
    server: Recorder

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        refused = len(self.server.bodies) < self.server.limited
        self.server.bodies.append(body)
        taken, headers = self.server.admits()
        refused = refused or not taken
        choice = {"text": "yes", "message": {"content": "yes"}, "finish_reason": "stop"}
        usage = {"prompt_tokens": 1, "completion_tokens": 1}
        answer = self.server.answer or {"choices": [choice], "usage": usage, "data": [{"embedding": [1.0]}]}
        content = json.dumps({"error": {"message": "slow down"}} if refused else answer).encode()
        self.send_response(429 if refused else 200)
        for name, value in {"content-length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Keep still."""


@contextmanager
def serving(server: ServerT) -> Iterator[ServerT]:
    with server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def recording(limited: int = 0) -> AbstractContextManager[Recorder]:
    return serving(Recorder(limited))


def run(rows: object, folder: Path, url: str, **options: Any) -> Any:
    options = {"task": "generate", "progress": False, **options}
    return headrace.run(rows, sink=folder / "out.jsonl", endpoints=[url], **options)


def test_an_endpoint_that_is_away_is_said_at_once_and_no_record_counts_as_done(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    events: list[Event] = []
    rows = [{"text": str(n)} for n in range(100)]
    with pytest.raises(BrokenOffError, match="cannot be reached"):
        run(rows, tmp_path, AWAY, attempts=2, listeners=[events.append])
    [line] = caplog.messages
    assert line.startswith(f"headrace: {AWAY} cannot be reached")
    assert line.endswith("2 times in all (attempts): check the address, and that it runs")
    ended = [event for event in events if isinstance(event, BatchDone)]
    assert [event.size - event.failed for event in ended] == [0] * 64, "those that were cancelled, too"
    meter = Meter()
    for event in events:
        meter.add(event)
    shown = meter.snapshot(events[-1].at)
    assert (shown.ok, shown.eta_s) == (0, None)
    assert "to go" not in describe(shown)


def test_a_server_that_limits_the_rate_is_said_with_what_to_set(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with recording(limited=3) as server:
        report = run([{"text": str(n)} for n in range(9)], tmp_path, server.url, concurrency=4)
    assert report.ok == 9
    [line] = caplog.messages
    assert line.startswith(f"headrace: {server.url} says 429: slow down: it limits the rate")
    assert "requests_per_minute" in line
    assert "concurrency, now 4" in line


def test_the_advice_is_about_the_server_not_about_a_device() -> None:
    from headrace.events import EndpointUsed
    from headrace.observe.reporting.advice import advise
    from headrace.observe.reporting.run_figures import Report
    from headrace.wording import spelled

    def said(limited: int, unanswered: int, held: int = 0) -> str:
        used = EndpointUsed(400, limited, unanswered, 64, 0.0, held)
        return spelled(advise(Report(ok=100, batches=100, wall_s=30.0, busy=0.99, endpoint=used)), "flags")

    assert said(300, 0).startswith("The server limits the rate: 300 of 400 requests were refused (429)")
    assert "--concurrency 16, would" in said(300, 0)
    assert said(0, 0, 300).startswith("300 of 400 requests waited for the limit of the rate (--requests-per-minute")
    assert said(0, 7).startswith("7 of 400 requests found no server")
    assert said(0, 0).startswith(
        "The server was at work 99% of the time: more requests at once (--concurrency, now 64)"
    )


def test_a_report_holds_what_became_of_the_requests(tmp_path: Path) -> None:
    events: list[Any] = []
    with recording(limited=3) as server:
        run([{"text": str(n)} for n in range(9)], tmp_path, server.url, listeners=[events.append])
    [used] = [event for event in events if type(event).__name__ == "EndpointUsed"]
    assert (used.sent, used.limited, used.unanswered, used.at_once) == (12, 3, 0, 64)


def test_sampling_of_the_job_is_sent_and_that_of_a_row_goes_before(tmp_path: Path) -> None:
    rows = [
        {"text": "a"},
        {"text": {"prompt": "b", "temperature": 0.9, "model": "theirs"}},
        {"text": {"messages": [{"role": "user", "content": "c"}], "max_completion_tokens": 3}},
    ]
    with recording() as server:
        run(rows, tmp_path, server.url, max_tokens=5, temperature=0.5)
    sent = sorted(server.bodies, key=lambda body: str(body.get("prompt") or body["messages"]), reverse=True)
    assert sent == [
        {"prompt": "b", "max_tokens": 5, "temperature": 0.9, "model": "theirs"},
        {"messages": [{"role": "user", "content": "c"}], "temperature": 0.5, "max_completion_tokens": 3},
        {"messages": [{"role": "user", "content": "a"}], "max_tokens": 5, "temperature": 0.5},
    ]


def test_everything_of_a_record_is_sent_for_the_server_to_check(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": [{"type": "video", "video": 1}], "other": {"a": [1]}}]
    body = {"messages": messages, "tools": [{"type": "function"}], "response_format": {"type": "x"}, "n": 2, "new": 1}
    with recording() as server:
        run([{"text": body}, {"text": messages}], tmp_path, server.url, extra_body={"new": 2, "user": "u"})
        assert sorted(server.bodies, key=len) == [{"messages": messages, "new": 2, "user": "u"}, {**body, "user": "u"}]
        server.bodies.clear()
        run([{"text": "a"}], tmp_path, server.url, chat=False, overwrite=True)
        run([{"text": "a"}], tmp_path, server.url, system_prompt="s", overwrite=True)
    told = [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}]
    assert server.bodies == [{"prompt": "a"}, {"messages": told}]


def test_tools_and_examples_of_the_job_are_sent(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "say"}}]
    examples = [{"text": "1", "answer": "2"}]
    own = {"messages": [{"role": "user", "content": "b"}], "tool_choice": "none"}
    with recording() as server:
        run([{"text": "a"}, {"text": own}, {"text": {"prompt": "c"}}], tmp_path, server.url, tools=tools,
            tool_choice="say", examples=examples)  # fmt: skip
    shown = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]
    chosen = {"type": "function", "function": {"name": "say"}}
    assert sorted(server.bodies, key=lambda body: str(body.get("prompt") or body["messages"]), reverse=True) == [
        {"prompt": "c"},
        {"messages": [*shown, {"role": "user", "content": "b"}], "tools": tools, "tool_choice": "none"},
        {"messages": [*shown, {"role": "user", "content": "a"}], "tools": tools, "tool_choice": chosen},
    ]


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ({"prompt": "a", "stream": True}, "stream is true"),
        ({"prompt": "a", "messages": []}, "either"),
        ([{"content": "a"}], "message 0"),
        ("", "empty"),
        ({"prompt": "half \ud800"}, "surrogate"),
        ({"prompt": "a", "temperature": float("nan")}, "JSON"),
    ],
)
def test_what_cannot_be_sent_costs_its_record_alone(value: object, reason: str, tmp_path: Path) -> None:
    with recording() as server:
        report = run([{"text": value}, {"text": "fine"}], tmp_path, server.url, max_error_rate=1)
    assert (report.ok, report.failed, len(server.bodies)) == (1, 1, 1)
    assert reason in (tmp_path / "out.errors.jsonl").read_text()


def test_tool_calls_reasoning_and_several_answers_are_kept(tmp_path: Path) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    choice = {"message": {"content": None, "tool_calls": [call], "reasoning_content": "why"}, "finish_reason": "stop"}
    with recording() as server:
        server.answer = {"choices": [choice, choice]}
        run([{"text": "a"}], tmp_path, server.url)
    [row] = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    plain = {"text": "", "finish_reason": "stop", "prompt_tokens": None, "completion_tokens": None}
    assert row["generation"] == plain | {"reasoning": "why", "tool_calls": [call], "choices": [choice, choice]}


class Windowed(Recorder):
    """Takes `most` requests in any `seconds`, and refuses the others; says so in headers if it `tells`."""

    def __init__(self, most: int, seconds: float, *, tells: bool) -> None:
        super().__init__(0)
        self.most, self.seconds, self.tells = most, seconds, tells
        self.taken: list[float] = []
        self.refused = 0
        self.lock = threading.Lock()

    def admits(self) -> tuple[bool, dict[str, str]]:
        with self.lock:
            now = time.monotonic()
            recent = [at for at in self.taken if at > now - self.seconds]
            if taken := len(recent) < self.most:
                self.taken.append(now)
                recent.append(now)
            else:
                self.refused += 1
        reset = recent[0] + self.seconds - now
        headers = {} if taken else {"retry-after-ms": str(int(reset * 1000) + 1)}
        if self.tells:
            headers |= {
                "x-ratelimit-limit-requests": str(self.most),
                "x-ratelimit-remaining-requests": str(self.most - len(recent)),
                "x-ratelimit-reset-requests": f"{int(reset * 1000) + 1}ms",
            }
        return taken, headers


@pytest.mark.parametrize("tells", [False, True])
def test_a_limit_of_the_rate_is_kept_and_used(tells: bool, tmp_path: Path) -> None:
    most, seconds, count = 5, 2.0, 11
    with serving(Windowed(most, seconds, tells=tells)) as server:
        options = {} if tells else {"requests_per_minute": 60 * most / seconds}
        report = run([{"text": str(n)} for n in range(count)], tmp_path, server.url, concurrency=8, **options)
    assert report.ok == count
    assert server.refused <= (6 if tells else 2), "with headers, some of the first burst; a busy machine may be late"
    took, least = server.taken[-1] - server.taken[0], (count - 1) // most * seconds
    assert took < 1.1 * least + 0.3, "a busy machine may be late"


def test_sampling_that_is_wrong_is_refused_before_a_request(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="temperature is -1: it must be a number between 0 and 100"):
        run([{"text": "a"}], tmp_path, AWAY, temperature=-1)
    with pytest.raises(ConfigError, match="temperature: task 'embed' has no such option"):
        run([{"text": "a"}], tmp_path, AWAY, task="embed", temperature=1)


def test_another_sampling_is_another_job(tmp_path: Path) -> None:
    with recording() as server:
        run([{"text": "a"}], tmp_path, server.url, temperature=0.5)
        with pytest.raises(headrace.errors.ResumeMismatchError, match=r"temperature was 0\.5, now not set"):
            run([{"text": "a"}], tmp_path, server.url)


def test_a_column_that_looks_like_a_setting_is_said_to_be_unused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with recording() as server:
        run([{"text": "a", "temperature": 0.9}], tmp_path, server.url)
        assert "the column 'temperature' is not used" in caplog.text
        assert '{"prompt": "...", "temperature": ...} in the column \'text\'' in caplog.text
        caplog.clear()
        run([{"text": "a", "stop": "x"}], tmp_path, server.url, keep_columns=["stop"], overwrite=True)
        run([{"text": "a", "seed": "x"}], tmp_path, server.url, prompt_template="{text}{seed}", overwrite=True)
    assert caplog.text == ""


def batch_file(folder: Path, url: str, body: dict[str, Any]) -> Path:
    row = {"custom_id": "one", "method": "POST", "url": url, "body": body}
    (folder / "batch.jsonl").write_text(json.dumps(row) + "\n")
    return folder / "batch.jsonl"


def test_the_model_of_a_line_of_a_batch_file_is_sent_or_refused_by_name(tmp_path: Path) -> None:
    with recording() as server:
        source = batch_file(tmp_path, "/v1/completions", {"model": "theirs", "prompt": "a"})
        run(source, tmp_path, server.url)
        assert server.bodies == [{"model": "theirs", "prompt": "a"}]
        source = batch_file(tmp_path, "/v1/embeddings", {"model": "theirs", "input": "a"})
        with pytest.raises(ConfigError, match=r"name the model 'theirs'.*pass model='theirs'"):
            run(source, tmp_path, server.url, task="embed", overwrite=True)
        run(source, tmp_path, server.url, task="embed", model="theirs", overwrite=True)
    assert server.bodies[1:] == [{"model": "theirs", "input": "a"}]


def test_progress_on_a_pipe_has_no_time_to_go_without_a_server(tmp_path: Path) -> None:
    from headrace.observe.live.progress import Progress

    stream, events = io.StringIO(), list[Event]()
    with pytest.raises(BrokenOffError):
        run([{"text": "a"}], tmp_path, AWAY, attempts=1, listeners=[events.append])
    with Progress(stream, clock=lambda: events[-1].at) as progress:
        for event in events:
            progress(event)
    assert "0 records" in stream.getvalue()
    assert "to go" not in stream.getvalue()
