"""Headrace in Flyte: what its backend would be told, and its local mode."""

from __future__ import annotations

import asyncio
import importlib
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from tests.integration.cluster import engines

from headrace.errors import ConfigError

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # flyte's own, of what it uses in an old way
    flyte = pytest.importorskip("flyte", reason='needs Flyte: pip install "headrace[flyte]"')
    importlib.import_module("flyte.app.extras")
    importlib.import_module("flyte.extras")
ROOT = Path(__file__).resolve().parents[3]
REAL = os.environ.get("HEADRACE_GSM8K")


def test_an_app_environment_is_scaled_as_asked() -> None:
    from headrace.cluster.flyte.app import app_environment

    resources = flyte.Resources(cpu=2, memory="4Gi", gpu=1)
    app = app_environment(
        "vectors", "embed", replicas=(0, 3), concurrency=7, scaledown_after_s=60, environment={"resources": resources}
    )
    assert app.scaling.replicas == (0, 3)
    assert app.scaling.metric == flyte.app.Scaling.Concurrency(val=7)
    assert app.scaling.scaledown_after.total_seconds() == 60
    assert app.resources == resources
    assert "/v1/embeddings" in {getattr(route, "path", "") for route in app.app.routes}


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"name": "No Spaces"}, "No Spaces"),
        ({"concurrency": 0}, "Concurrency must be"),
        ({"replicas": (3, 1)}, "vectors"),
        ({"task": "dance"}, "unknown task 'dance'"),
        ({"truncat_dim": 3}, "truncat_dim: task 'embed' has no such option; known: .*did you mean truncate_dim"),
        ({"environment": {"wings": 2}}, "wings"),
    ],
)
def test_what_flyte_refuses_is_a_configuration_error(wrong: dict[str, object], named: str) -> None:
    from headrace.cluster.flyte.app import app_environment

    with pytest.raises(ConfigError, match=named):
        app_environment(**({"name": "vectors", "task": "embed"} | wrong))  # type: ignore[arg-type]


def test_the_example_s_workers_are_reused_as_its_task_specifications_say() -> None:
    from flyte.extras import serialize

    from examples import questions_flyte

    policy = serialize(questions_flyte.from_worker).task_template.reuse_policy
    assert (policy.min_replicas, policy.max_replicas, policy.concurrency) == (2, 2, 8)
    assert policy.idle_ttl.seconds == 300
    assert questions_flyte.app in questions_flyte.env.depends_on


env = flyte.TaskEnvironment(name="several", reusable=flyte.ReusePolicy(replicas=1, concurrency=8))


@env.task
async def measured(texts: list[str]) -> list[list[tuple[str, int, int]]]:
    return [await engines.first.map(texts), await engines.second.map(texts)]


@env.task
async def fanned_out(chunks: int) -> list[list[list[tuple[str, int, int]]]]:
    return list(await asyncio.gather(*[measured.aio(["a" * (number + 1), "b"]) for number in range(chunks)]))


def test_tasks_of_a_reusable_worker_share_several_models_of_which_one_is_loaded() -> None:
    flyte.init()
    found = flyte.with_runcontext(mode="local").run(fanned_out, chunks=4).outputs()[0]
    engines.models.close()
    expected = [[[[name, number + 1, 1], [name, 1, 1]] for name in ("first", "second")] for number in range(4)]
    assert [[[list(row) for row in rows] for rows in task] for task in found] == expected


@pytest.mark.skipif("HEADRACE_TEST_CLUSTER" not in os.environ, reason="takes minutes: scripts/test-cluster runs it")
@pytest.mark.parametrize("real", [False, pytest.param(True, marks=pytest.mark.skipif(not REAL, reason="no such file"))])
@pytest.mark.parametrize(("example", "ways"), [("questions_flyte", 2), ("questions", 1)])
def test_the_examples_answer_every_question(example: str, ways: int, real: bool, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "HEADRACE_GSM8K"}
    environment |= {"HOME": str(tmp_path), "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    if real:
        environment["HEADRACE_GSM8K"] = str(Path(str(REAL)).resolve())
    command = [sys.executable, str(ROOT / "examples" / f"{example}.py")]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert ended.returncode == 0, ended.stderr
    # The model can do sums; to a real question it says something.
    assert ended.stdout.count("400 answers" if real else "400 of 400 right") == ways, ended.stderr


BY_NAME = """
import flyte, httpx
from headrace.cluster.flyte.app import app_environment

app = app_environment("vectors", "embed", "acme/encoder")
env = flyte.TaskEnvironment(name="texts", depends_on=[app])


@env.task
async def embed(url: str) -> str:
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        [model] = (await client.get("/v1/models")).json()["data"]
        answer = (await client.post("/v1/embeddings", json={"input": "a text"})).json()
    return f"{model['id']} {model['commit']} {len(answer['data'][0]['embedding'])}"


if __name__ == "__main__":
    flyte.init()
    with flyte.with_servecontext(mode="local", activate_timeout=120).serve(app).ephemeral_ctx_sync():
        print(flyte.with_runcontext(mode="local").run(embed, url=app.endpoint).outputs()[0])
"""


@pytest.mark.skipif("HEADRACE_TEST_CLUSTER" not in os.environ, reason="takes long: scripts/test-cluster runs it")
def test_an_app_has_a_model_by_its_name_on_the_hub(tmp_path: Path) -> None:
    from tests.integration.hub.standin import running_hub
    from tests.small_models import text_model

    with running_hub() as hub:
        commit = hub.repository("acme/encoder").commit_folder(text_model(tmp_path / "encoder", head=False))
        environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
        environment |= {"HF_HOME": str(tmp_path / "hf"), "HF_ENDPOINT": hub.url, "HOME": str(tmp_path)}
        environment |= {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
        (tmp_path / "by_name.py").write_text(BY_NAME)
        command = [sys.executable, str(tmp_path / "by_name.py")]
        ended = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, check=False)
    assert ended.returncode == 0, ended.stderr
    assert f"acme/encoder {commit} 32" in ended.stdout
