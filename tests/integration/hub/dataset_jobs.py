"""Jobs from and to datasets of a hub on loopback, in a process of their own, since the client reads its settings once.

`python -m tests.integration.hub.dataset_jobs FOLDER`
"""

from __future__ import annotations

import io
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.integration.hub.standin import Hub, running_hub

ROWS = 1500
FAKE: dict[str, Any] = {"task": "embed", "engine": "headrace.testing:FakeEngine", "progress": False}
CARD = b"""---
configs:
- config_name: en
  data_files: en/*
- config_name: de
  data_files: de/*
---
"""


def shard(numbers: range) -> bytes:
    """A Parquet file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    buffer = io.BytesIO()
    table = pa.table({"id": numbers, "text": [f"text {n}" for n in numbers], "extra": ["x"] * len(numbers)})
    pq.write_table(table, buffer, row_group_size=400)
    return buffer.getvalue()


def refusal(source: str, sink: str = "x.jsonl") -> str:
    """What a job says that cannot begin."""
    import headrace
    from headrace.errors import ConfigError

    with pytest.raises(ConfigError) as refused:
        headrace.run(source, sink=sink, **FAKE)
    told = str(refused.value)
    assert "\n" not in told
    return told


def a_split_is_read_at_one_commit(hub: Hub) -> None:
    """Also when the job is continued, after the branch has moved."""
    import headrace
    from headrace.jobs.settings import Limits

    source = hub.repository("datasets/me/questions")
    shards = {
        f"data/train-0000{n}-of-00002.parquet": shard(range(n * 1000, min(ROWS, n * 1000 + 1000))) for n in (0, 1)
    }
    first = source.commit({**shards, "data/test-00000-of-00001.parquet": shard(range(3))})
    told = refusal("hf://datasets/me/questions")
    assert f"has the splits train, test: name one, such as hf://datasets/me/questions@{first}?split=train" in told

    def run(engine: Any = FAKE["engine"], **options: Any) -> Any:
        address = "hf://datasets/me/questions?split=train&columns=id,text"
        return headrace.run(address, sink="out.jsonl", **{**FAKE, "engine": engine}, **options)

    done = run(limit=900, limits=Limits(part_records=200))
    assert done.ok == 900
    second = source.commit({"data/train-00000-of-00001.parquet": shard(range(9))})
    assert run(limit=900).ok == 0, "it is finished, and its commit is known"
    Path("out.jsonl").unlink()
    assert run(limit=900).ok == 900, "again the rows that the branch has no more"
    assert f"@{first}" in Path("out.jsonl.parts/job.json").read_text()
    assert run(overwrite=True).ok == 9
    assert f"@{second}" in Path("out.jsonl.parts/job.json").read_text()


def wrong_names_are_refused(hub: Hub) -> None:
    """With what there is."""
    hub.repository("datasets/me/two").commit(
        {"README.md": CARD, "en/0.parquet": shard(range(5)), "de/0.parquet": shard(range(2))}
    )
    for name, why in {
        "me/two": "Config name is missing",
        "me/two?config=fr": "'fr'",
        "me/two?config=en&split=test": "has the splits train: name one",
        "me/two?config=en&columns=id,body": "body",
        "me/two?spilt=train": "'spilt' is not known; known: config, split, columns",
        "me/none": "cannot read hf://datasets/me/none: .*Repository",
        "../../etc?split=train": "Invalid HF URI",
        "me/two@v9": "cannot read hf://datasets/me/two@v9: .*v9",
    }.items():
        told = refusal(f"hf://datasets/{name}")
        assert re.search(why, told), (name, told)


def an_output_is_pushed_once(hub: Hub) -> None:
    """Also if the commit fails at first, and once more after a retry."""
    import headrace
    from headrace.errors import BrokenOffError

    address, rows = "hf://datasets/me/vectors?split=test", [{"id": n, "text": f"text {n}"} for n in range(50)]
    bad = Path("in.jsonl")
    bad.write_text("".join(json.dumps(row) + "\n" for row in rows) + "bad\n")
    assert "log in" in refusal("in.jsonl", address)
    os.environ["HF_TOKEN"] = hub.token
    hub.refused_commits = 1
    with pytest.raises(BrokenOffError, match="run again to push them"):
        headrace.run("in.jsonl", sink=address, **FAKE)
    repository = hub.repository("datasets/me/vectors")
    assert repository.history == [] and repository.private
    for _ in range(2):
        headrace.run("in.jsonl", sink=address, **FAKE)
    assert len(repository.history) == 1 and pushed(hub) == list(range(50))
    bad.write_text(bad.read_text().replace("bad", '{"id": 50, "text": "good"}'))
    assert headrace.run("in.jsonl", sink=address, retry=True, ignore_changes=True, **FAKE).ok == 1
    assert pushed(hub) == list(range(51)) and len(repository.history) == 2
    Path("elsewhere").mkdir()
    os.chdir("elsewhere")
    assert "no job here has pushed; pass overwrite=True" in refusal("../in.jsonl", address)
    assert "a commit cannot be changed" in refusal("../in.jsonl", f"hf://datasets/me/vectors@{'0' * 40}")


def pushed(hub: Hub) -> list[int]:
    """The ids that the hub has."""
    import pyarrow.parquet as pq

    repository = hub.repository("datasets/me/vectors")
    files = repository.commits[repository.branches["main"]]
    assert sorted(files) == [".gitattributes", "data/test-00000-of-00001.parquet"], sorted(files)
    found: list[int] = pq.read_table(io.BytesIO(files["data/test-00000-of-00001.parquet"]))["id"].to_pylist()
    return found


def main() -> None:
    """All of them."""
    os.chdir(sys.argv[1])
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_OFFLINE", "HF_HUB_CACHE", "HTTP_PROXY", "http_proxy"):
        os.environ.pop(name, None)
    with running_hub() as hub:
        os.environ |= {
            "HF_ENDPOINT": hub.url,
            "HF_HOME": str(Path("hf").resolve()),
            "HF_HUB_DISABLE_XET": "1",  # uploads by the protocol that the stand-in knows
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        }
        for case in (a_split_is_read_at_one_commit, wrong_names_are_refused, an_output_is_pushed_once):
            case(hub)
            print(case.__name__, "ok", flush=True)  # noqa: T201 - shown if a later one fails


if __name__ == "__main__":
    main()
