"""The Batch API: files in, batches run beside requests, files out."""

from __future__ import annotations

import gzip
import io
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.integration.serving.running import Running, running
from tests.settings import server_settings
from tests.waiting import until

from headrace.app.servers.server import ServerSettings
from headrace.engines.choosing.config import EngineConfig
from headrace.serving.batches import files
from headrace.serving.errors import ApiError
from headrace.serving.limits import ServeLimits
from headrace.testing import FakeEngine

ENGINES = "tests.integration.serving.engines"


def line(number: int, **changes: Any) -> dict[str, Any]:
    row = {"custom_id": f"r{number}", "method": "POST", "url": "/v1/embeddings", "body": {"input": f"text {number}"}}
    return row | changes


def upload(server: Running, rows: list[Any]) -> str:
    content = "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    response = server.client.post(
        "/v1/files", files={"file": ("in.jsonl", content.encode())}, data={"purpose": "batch"}
    )
    assert response.status_code == 200, response.text
    return str(response.json()["id"])


def begin(server: Running, rows: list[Any], endpoint: str = "/v1/embeddings", window: str = "24h") -> str:
    body = {"input_file_id": upload(server, rows), "endpoint": endpoint, "completion_window": window}
    response = server.post("/v1/batches", body)
    assert response.status_code == 200, response.text
    return str(response.json()["id"])


def batch(server: Running, identity: str) -> dict[str, Any]:
    return dict(server.client.get(f"/v1/batches/{identity}").json())


def ended(server: Running, identity: str) -> dict[str, Any]:
    until(lambda: batch(server, identity)["status"] in ("completed", "failed", "expired", "cancelled"))
    return batch(server, identity)


def rows_of(server: Running, file: str | None) -> list[dict[str, Any]]:
    return [json.loads(row) for row in server.client.get(f"/v1/files/{file}/content").text.splitlines()]


@pytest.fixture
def serve(tmp_path: Path) -> Callable[..., Any]:
    def make(engine: str = "headrace.testing:FakeEngine", **settings: Any) -> Any:
        settings.setdefault("limits", ServeLimits(drain_s=2))
        return running(server_settings(**{"task": "embed", **settings}, engine=engine, state=tmp_path / "state"))

    return make


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    settings = ServerSettings(
        EngineConfig(task="embed", engine="headrace.testing:FakeEngine"), state=tmp_path_factory.mktemp("state")
    )
    with running(settings) as server:
        yield server


def test_each_request_is_answered_once_and_bad_ones_apart(server: Running, tmp_path: Path) -> None:
    rows = [
        line(0),
        line(1, body={"input": ""}),
        line(2, body={"inputs": "a"}),
        *(line(number) for number in range(3, 50)),
    ]
    done = ended(server, begin(server, rows))
    assert done["status"] == "completed"
    assert done["request_counts"] == {"total": 50, "completed": 48, "failed": 2}
    output = rows_of(server, done["output_file_id"])
    assert [row["custom_id"] for row in output] == ["r0", *(f"r{number}" for number in range(3, 50))]
    assert output[0]["response"]["body"]["data"][0]["embedding"] == FakeEngine().vector("text 0")
    errors = rows_of(server, done["error_file_id"])
    assert [row["custom_id"] for row in errors] == ["r1", "r2"]
    assert [row["error"]["message"] for row in errors] == [
        "text 0 of input is empty",
        "input: Field required; unknown field 'inputs'; did you mean input?",
    ]
    assert all(done[f"{moment}_at"] for moment in ("in_progress", "finalizing", "completed"))


def test_a_served_name_need_not_be_that_of_a_folder(serve: Callable[..., Any]) -> None:
    with serve(name="embedder-v2") as server:
        rows = [line(0), line(1, body={"input": "text", "model": "embedder-v2"})]
        done = ended(server, begin(server, rows))
        assert done["status"] == "completed", done["errors"]
        answers = [row["response"]["body"] for row in rows_of(server, done["output_file_id"])]
        assert [answer["model"] for answer in answers] == ["embedder-v2", "embedder-v2"]


def test_files_are_described_listed_and_deleted(server: Running) -> None:
    identity = upload(server, [line(0)])
    assert server.client.get(f"/v1/files/{identity}").json()["purpose"] == "batch"
    listed = server.client.get("/v1/files", params={"limit": 1}).json()
    assert len(listed["data"]) == 1
    assert identity in {file["id"] for file in server.client.get("/v1/files").json()["data"]}
    assert server.client.delete(f"/v1/files/{identity}").json()["deleted"]
    assert server.client.get(f"/v1/files/{identity}").status_code == 404


@pytest.mark.parametrize("name", ["../keys", "file-..%2f..%2fetc", "file-" + "0" * 32, "%2e%2e/%2e%2e/etc/passwd"])
def test_no_name_reaches_the_file_system(server: Running, name: str) -> None:
    for path in (f"/v1/files/{name}", f"/v1/files/{name}/content", f"/v1/batches/{name}"):
        assert server.client.get(path).status_code == 404


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({"endpoint": "/v1/chat/completions"}, 400),
        ({"completion_window": "soon"}, 400),
        ({"input_file_id": "file-none"}, 404),
        ({"metadata": {"a": 5}}, 400),
    ],
)
def test_what_cannot_be_begun_is_told(server: Running, change: dict[str, Any], status: int) -> None:
    body = {"input_file_id": upload(server, [line(0)]), "endpoint": "/v1/embeddings"} | change
    assert server.post("/v1/batches", body).status_code == status


@pytest.mark.parametrize("rows", [["nonsense"], [line(0, url="/v1/completions", body={"prompt": "x"})]])
def test_a_file_that_is_none_fails_its_batch(server: Running, rows: list[Any]) -> None:
    done = ended(server, begin(server, rows))
    assert done["status"] == "failed"
    assert done["errors"]["data"][0]["message"]
    assert "/" + "tmp" not in json.dumps(done["errors"])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (json.dumps(line(0)).encode("utf-16"), "the input file is text in UTF-16: send JSON Lines in UTF-8"),
        (
            gzip.compress(json.dumps(line(0)).encode()),
            "the input file is gzip data, not text: send JSON Lines in UTF-8",
        ),
    ],
    ids=["utf-16", "gzip"],
)
def test_a_file_of_another_kind_is_told_so_that_its_sender_can_act(
    server: Running, content: bytes, message: str
) -> None:
    sent = server.client.post("/v1/files", files={"file": ("a", content)}, data={"purpose": "batch"}).json()
    begun = server.post("/v1/batches", {"input_file_id": sent["id"], "endpoint": "/v1/embeddings"}).json()
    [error] = ended(server, begun["id"])["errors"]["data"]
    assert (error["code"], error["message"]) == ("invalid_file", message)


def test_an_upload_is_bounded_and_must_be_a_batch(serve: Callable[..., Any]) -> None:
    with serve(limits=ServeLimits(max_file_bytes=10_000)) as server:

        def post(content: bytes, **form: Any) -> int:
            response = server.client.post("/v1/files", files={"file": ("x", content)}, data={"purpose": "batch"} | form)
            return int(response.status_code)

        assert post(b"x" * 9_000) == 200
        assert post(b"x" * 20_000) == 413
        assert post(b"") == 400
        assert post(b"x", purpose="fine-tune") == 400
        assert server.client.post("/v1/files", data={"purpose": "batch"}).status_code == 400


def test_a_cancelled_batch_keeps_what_is_finished(serve: Callable[..., Any]) -> None:
    with serve(f"{ENGINES}:Gradual", batch_tokens=8) as server:
        identity = begin(server, [line(number) for number in range(400)])
        until(lambda: batch(server, identity)["request_counts"]["completed"] > 0)
        assert server.post(f"/v1/batches/{identity}/cancel", {}).json()["status"] == "cancelling"
        done = ended(server, identity)
        assert done["status"] == "cancelled"
        kept = rows_of(server, done["output_file_id"])
        assert len(kept) == done["request_counts"]["completed"]
        assert 0 < len(kept) < 400
        assert server.post(f"/v1/batches/{identity}/cancel", {}).status_code == 409


def test_an_expired_batch_keeps_what_is_finished(serve: Callable[..., Any]) -> None:
    with serve(f"{ENGINES}:Gradual", batch_tokens=8) as server:
        done = ended(server, begin(server, [line(number) for number in range(2_000)], window="2s"))
        assert done["status"] == "expired"
        assert 0 < len(rows_of(server, done["output_file_id"])) < 2_000


def test_a_stopped_server_leaves_its_batches_to_the_next(serve: Callable[..., Any]) -> None:
    with serve(f"{ENGINES}:Gradual", batch_tokens=8) as server:
        identity = begin(server, [line(number) for number in range(300)])
        until(lambda: batch(server, identity)["request_counts"]["completed"] > 0)
    with serve() as server:
        done = ended(server, identity)
        assert done["status"] == "completed"
        ids = [row["custom_id"] for row in rows_of(server, done["output_file_id"])]
        assert ids == [f"r{number}" for number in range(300)]
        assert sum(server.engine.batch_sizes) < 300


def test_requests_go_before_batches(serve: Callable[..., Any]) -> None:
    with serve(f"{ENGINES}:Gradual", batch_tokens=8) as server:
        identity = begin(server, [line(number) for number in range(400)])
        until(lambda: batch(server, identity)["status"] == "in_progress")
        for _ in range(5):
            response = server.post("/v1/embeddings", {"input": "now", "timeout": 2})
            assert response.status_code == 200
        assert batch(server, identity)["status"] == "in_progress"


def test_a_batch_of_chats(tmp_path: Path) -> None:
    rows = [
        {
            "custom_id": str(number),
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"messages": [{"role": "user", "content": f"say {number}"}]},
        }
        for number in range(40)
    ]
    with running(
        ServerSettings(EngineConfig(task="generate", engine=f"{ENGINES}:Talker"), state=tmp_path / "s")
    ) as server:
        done = ended(server, begin(server, rows, "/v1/chat/completions"))
        assert done["request_counts"] == {"total": 40, "completed": 40, "failed": 0}
        answers = [row["response"]["body"]["choices"][0]["message"] for row in rows_of(server, done["output_file_id"])]
        assert answers == [{"role": "assistant", "content": f"say {number}"} for number in range(40)]


class Short(FakeEngine):
    """Takes three words, and does not say beforehand how long its vectors are."""

    def __init__(self, model: str | None = None) -> None:
        super().__init__(model, max_model_len=3)


def test_lines_that_are_cut_or_cannot_be_obeyed_say_so(serve: Callable[..., Any]) -> None:
    long = "one two three four"
    bodies = [{"input": "short"}, {"input": long}, {"input": ["a", long]}]
    bodies += [{"input": "a", "dimensions": 4}, {"input": "a", "timeout": 5}]
    with serve(f"{__name__}:Short", name="short") as server:
        done = ended(server, begin(server, [line(number, body=body) for number, body in enumerate(bodies)]))
        answers = [row["response"]["body"] for row in rows_of(server, done["output_file_id"])]
        assert [answer["usage"].get("truncated_inputs") for answer in answers] == [None, 1, 1]
        assert [[item.get("truncated") for item in answer["data"]] for answer in answers] == [
            [None],
            [True],
            [None, True],
        ]
        first, second = (row["error"] for row in rows_of(server, done["error_file_id"]))
        assert [(error["type"], error["code"], error["param"]) for error in (first, second)] == [
            ("invalid_request_error", "bad_dimensions", "dimensions"),
            ("invalid_request_error", "bad_timeout", "timeout"),
        ]
        assert first["message"].startswith("dimensions is 4: vectors")
        assert "timeout" in second["message"]


def test_what_fails_in_a_batch_fails_as_the_same_request_does(server: Running) -> None:
    bodies: list[dict[str, Any]] = [
        {"input": "a", "dimensions": True},
        {"input": "a", "dimensions": "5"},
        {"input": 5},
        {"input": ""},
        {"input": "a", "colour": "red"},
        {"input": "x" * 1_000_001},
    ]
    done = ended(server, begin(server, [line(number, body=body) for number, body in enumerate(bodies)]))
    errors = [row["error"] for row in rows_of(server, done["error_file_id"])]
    assert errors == [server.post("/v1/embeddings", body).json()["error"] for body in bodies]


@pytest.mark.parametrize(
    ("query", "param"),
    [("after=file-nope", "after"), ("order=asc&limit=1.5", "limit"), ("limit=true", "limit"), ("colour=red", "colour")],
)
def test_a_list_is_not_chosen_from_by_what_nobody_reads(server: Running, query: str, param: str) -> None:
    for path in ("/v1/files", "/v1/batches"):
        refused = server.client.get(f"{path}?{query.replace('order=asc&', '') if 'batches' in path else query}")
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == param


def test_whoever_deletes_while_listing_gets_every_file(serve: Callable[..., Any]) -> None:
    with serve() as server:
        files = {upload(server, [line(number)]) for number in range(5)}
        assert len(server.client.get("/v1/files?limit=10000").json()["data"]) == 5
        deleted, page = set(), server.client.get("/v1/files?limit=2").json()
        while page["data"]:
            for file in page["data"]:
                assert server.client.delete(f"/v1/files/{file['id']}").status_code == 200
                deleted.add(file["id"])
            page = server.client.get(f"/v1/files?limit=2&after={page['last_id']}").json()
        assert deleted == files


def test_an_id_that_is_empty_deletes_nothing(server: Running) -> None:
    assert server.client.get("/v1/files/").json()["object"] == "list"  # a slash at the end changes nothing
    assert server.client.delete("/v1/files/").status_code == 405


def test_ids_of_answers_are_those_of_their_batch(server: Running) -> None:
    seen: set[str] = set()
    for _ in range(2):
        done = ended(server, begin(server, [line(number) for number in range(3)]))
        rows = rows_of(server, done["output_file_id"])
        assert all(row["id"] == f"batch_req_{row['response']['request_id']}" for row in rows)
        seen |= {row["id"] for row in rows}
    assert len(seen) == 6


def test_the_head_of_a_file_is_told_without_reading_it(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    path = f"/v1/files/{upload(server, [line(number) for number in range(100)])}/content"
    whole = server.client.get(path)

    def unread(*_: Any, **__: Any) -> None:
        raise AssertionError("the file is read")

    monkeypatch.setattr("starlette.responses.anyio.open_file", unread)
    head = server.client.head(path)
    assert (head.status_code, head.content) == (200, b"")
    names = ("content-length", "content-type", "etag", "last-modified")
    assert [head.headers[name] for name in names] == [whole.headers[name] for name in names]
    assert int(head.headers["content-length"]) == len(whole.content)


def test_a_misspelt_field_of_a_line_is_named_with_the_missing_one(server: Running) -> None:
    rows = [{("customid" if name == "custom_id" else name): value for name, value in line(0).items()}, line(1)]
    done = ended(server, begin(server, rows))
    assert [error["message"] for error in done["errors"]["data"]] == [
        "custom_id is None: it must be a non-empty string; unknown field 'customid'; did you mean custom_id?"
    ]


def test_a_custom_id_that_cannot_be_written_is_refused(server: Running) -> None:
    done = ended(server, begin(server, [line(0), line(1, custom_id="half \ud800")]))
    assert [(error["line"], error["code"]) for error in done["errors"]["data"]] == [(2, "invalid_custom_id")]


def test_fields_that_nobody_reads_are_refused(server: Running) -> None:
    file = upload(server, [line(0)])
    body = {"input_file_id": file, "endpoint": "/v1/embeddings"}
    refused = server.post("/v1/batches", body | {"expires": 3600})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "expires")
    assert server.post("/v1/batches", body | {"output_expires_after": None}).status_code == 200
    parts = {"purpose": "batch", "expires_after": "3600"}
    refused = server.client.post("/v1/files", files={"file": ("in.jsonl", b"{}")}, data=parts)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "expires_after")


@pytest.mark.parametrize(
    "parts",
    [
        {"expires_after[seconds]": "3600"},
        {"expires_after[anchor]": "created_at"},
        {"expires_after[anchor]": "created_at", "expires_after[seconds]": "3599"},
        {"expires_after[anchor]": "last_active_at", "expires_after[seconds]": "3600"},
    ],
)
def test_an_expiry_that_cannot_be_kept_is_refused(server: Running, parts: dict[str, str]) -> None:
    answer = server.client.post("/v1/files", files={"file": ("in.jsonl", b"{}")}, data={"purpose": "batch", **parts})
    assert answer.status_code == 400
    assert "expires_after" in answer.json()["error"]["param"]


def test_files_are_deleted_when_their_time_has_passed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [int(time.time())]
    monkeypatch.setattr(files, "now", lambda: clock[0])
    store = files.FileStore(tmp_path)

    def create(seconds: int | None) -> str:
        return store.create(io.BytesIO(b"{}"), "in.jsonl", "batch", None, seconds)["id"]

    never, later, used = create(None), create(3_600), create(3_600)
    clock[0] += 3_599
    assert store.get(later)["expires_at"] == clock[0] + 1
    clock[0] += 1
    with pytest.raises(ApiError, match="there is no file"):
        store.path(later)
    assert {file["id"] for file in store.list()} == {never}
    assert store.kept(used).read_bytes() == b"{}", "a batch may still read it"
    store.delete_expired({used})
    assert {path.stem for path in tmp_path.iterdir()} == {never, used}


def test_the_output_files_of_a_batch_have_its_expiry(server: Running) -> None:
    body = {"input_file_id": upload(server, [line(0)]), "endpoint": "/v1/embeddings"}
    expiry = {"anchor": "created_at", "seconds": 7_200}
    begun = server.post("/v1/batches", body | {"output_expires_after": expiry}).json()
    assert begun["output_expires_after"] == expiry
    done = ended(server, begun["id"])
    file = server.client.get(f"/v1/files/{done['output_file_id']}").json()
    assert file["expires_at"] == file["created_at"] + 7_200
    wrong = server.post("/v1/batches", body | {"output_expires_after": {"anchor": "created_at", "seconds": 1}})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "output_expires_after.seconds")


def test_files_are_listed_by_purpose_and_in_either_order(server: Running) -> None:
    mine = {upload(server, [line(0)]) for _ in range(3)}

    def listed(**params: Any) -> list[Any]:
        """The files of this test: batches of other tests may still add theirs."""
        return [file for file in server.client.get("/v1/files", params=params).json()["data"] if file["id"] in mine]

    assert {file["id"] for file in listed(limit=10_000)} == mine
    assert listed(order="asc", limit=10_000) == listed(limit=10_000)[::-1]
    assert {file["id"] for file in listed(purpose="batch", limit=10_000)} == mine
    assert {file["purpose"] for file in listed(purpose="batch", limit=10_000)} == {"batch"}
    assert listed(purpose="assistants") == []
    assert server.client.get("/v1/files", params={"order": "up"}).status_code == 400


@pytest.mark.parametrize("damage", ["{", "[]", "{}", ""])
def test_a_damaged_or_lost_file_takes_no_other_with_it(serve: Callable[..., Any], tmp_path: Path, damage: str) -> None:
    with serve() as server:
        good, damaged, lost = (upload(server, [line(0)]) for _ in range(3))
        (tmp_path / f"state/files/{damaged}.json").write_text(damage)
        (tmp_path / f"state/files/{lost}.jsonl").unlink()
        listed = server.client.get("/v1/files").json()["data"]
        assert {file["id"] for file in listed} == {good, lost}
        for path in (f"/v1/files/{damaged}", f"/v1/files/{damaged}/content", f"/v1/files/{lost}/content"):
            response = server.client.get(path)
            assert (response.status_code, response.json()["error"]["code"]) == (404, "file_not_found")
        assert server.client.delete(f"/v1/files/{lost}").status_code == 200
        assert server.client.get(f"/v1/files/{good}/content").status_code == 200
