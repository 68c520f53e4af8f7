"""Packages of others: a task and an engine from one that is installed, and broken ones, which cost only themselves."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.acceptance.command import ROOT, python, traced
from tests.acceptance.warm import SOURCES

PAGE = (ROOT / "docs" / "plugins.md").read_text(encoding="utf-8")
TEXTS = ["Return the running event loop.", "Parse the headers.", "Create a window.", "Fail the test."]
MAIN = "from headrace.cli.main import main; main()"

Run = Callable[..., subprocess.CompletedProcess[str]]


def blocks(language: str, page: str = PAGE) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page, flags=re.DOTALL | re.MULTILINE)


def installed(code: str, project: str, folder: Path, name: str) -> Path:
    """The folder into which a package of one module is installed, by pip and without a network."""
    source, target = folder / "source", folder / "installed"
    source.mkdir(exist_ok=True)
    (source / "pyproject.toml").write_text(project)
    (source / f"{name}.py").write_text(code)
    offline = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--disable-pip-version-check"]
    pip = [sys.executable, "-m", "pip", "install", *offline, "--target", str(target), str(source)]
    subprocess.run(pip, check=True, capture_output=True, text=True)
    return target


@pytest.fixture(scope="module")
def shout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the package of docs/plugins.md is installed, with the sink of docs/sinks.md."""
    code = blocks("python")[0] + blocks("python", (ROOT / "docs" / "sinks.md").read_text(encoding="utf-8"))[0]
    return installed(code, blocks("toml")[0], tmp_path_factory.mktemp("shout"), "headrace_shout")


@pytest.fixture
def run(shout: Path, tmp_path: Path) -> Run:
    """Runs Python with the package, and with other folders before it."""
    (tmp_path / "docs.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))

    def run(
        *arguments: str, code: str = MAIN, also: tuple[Path, ...] = (), imported: str = "light"
    ) -> subprocess.CompletedProcess[str]:
        given = ["headrace", *arguments]
        variables = {"PYTHONPATH": os.pathsep.join(map(str, [SOURCES, *also, shout])), "COLUMNS": "200"}
        code = f"import sys; sys.argv[0] = 'headrace'\n{code}"
        with traced(python(code, given, folder=tmp_path, imported=imported, **variables)) as program:
            output, errors = program.communicate()
        return subprocess.CompletedProcess(given, program.returncode, output, errors)

    return run


def test_the_commands_of_the_page_write_what_it_shows(run: Run, tmp_path: Path) -> None:
    command, said, head, shown, to_shelf, said_of_shelf = blocks("console")[1].strip().splitlines()
    ended = run(*command.split()[2:], imported="nothing")
    assert (ended.returncode, said in ended.stdout + ended.stderr) == (0, True), ended.stderr
    assert (tmp_path / head.split()[-1]).read_text().splitlines()[0] == shown
    ended = run(*to_shelf.replace("'", "").split()[2:])
    assert (ended.returncode, said_of_shelf.partition("shelf")[0] in ended.stderr) == (0, True), ended.stderr
    rows = json.loads((tmp_path / "books.shouted.json").read_text())
    assert [row["shouted"] for row in rows.values()] == [text.upper() + "!" for text in TEXTS]


def test_a_table_is_not_said_to_be_verified_and_the_nearest_scheme_is_named(run: Run) -> None:
    job = ("run", "--task", "shout", "-i", "docs.jsonl", "-o")
    assert run(*job, "shelf:///books?table=loud").returncode == 0
    assert run("inspect", "shelf:///books?table=loud").returncode == 0
    ended = run("inspect", "--verify", "shelf:///books?table=loud")
    assert (ended.returncode, "rows of" in ended.stderr) == (2, True), ended.stderr
    assert "did you mean shelf?" in run(*job, "shelv:///books?table=loud").stderr


def test_it_is_there_in_python_too(run: Run) -> None:
    job = "import headrace; rows = headrace.run([{'text': 'hush'}], sink='list', progress=False, "
    ended = run(code=job + "task='shout', marks=3); print(rows[0]['shouted'])")
    assert ended.stdout == "HUSH!!!\n", ended.stderr
    ended = run(code=job + "task='yell')")
    assert "unknown task 'yell': use 'shout'" in ended.stderr


def test_its_engine_is_an_object_with_options(run: Run) -> None:
    job = "import headrace; from headrace_shout import Capitals; rows = [{'text': 'hush'}]; "
    ended = run(
        code=job + "print(headrace.run(rows, sink='list', progress=False, engine=Capitals(marks=3))[0]['shouted'])"
    )
    assert ended.stdout == "HUSH!!!\n", ended.stderr


def test_a_server_offers_it(run: Run) -> None:
    code = (
        "import headrace; from starlette.testclient import TestClient\n"
        "with TestClient(headrace.build_app('shout', marks=2), 'http://127.0.0.1') as client:\n"
        "    print(client.post('/generate', json={'prompts': ['hush'], 'task_id': '1'}).json())\n"
        "    print(client.get('/v1/models').json()['data'][0]['task'])"
    )
    ended = run(code=code)
    assert ended.stdout == "{'results': ['HUSH!!'], 'task_id': '1'}\nshout\n", ended.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--mark", "2"), "--mark: task 'shout' has no such option; known: --marks; did you mean --marks?"),
        (("--marks", "many"), "marks is 'many'; it must be a whole number"),
        (("--marks", "-1"), "marks is -1; it must be >= 0"),
        (("--model", "x"), "--model is 'x', and engine 'capitals' of task 'shout' has no models; leave it out"),
        (("--engine", "louder"), "task 'shout' has no engine 'louder'; known: capitals, or module:name"),
    ],
)
def test_its_options_are_checked_as_headrace_s_own(run: Run, arguments: tuple[str, ...], message: str) -> None:
    ended = run("run", "--task", "shout", "-i", "docs.jsonl", "-o", "out.jsonl", *arguments)
    assert ended.returncode == 2
    assert message in ended.stderr


def test_an_output_of_other_options_is_not_continued(run: Run) -> None:
    command = ("run", "--task", "shout", "-i", "docs.jsonl", "-o", "out.jsonl", "--marks")
    assert run(*command, "2").returncode == 0
    ended = run(*command, "3")
    assert (ended.returncode, "marks" in ended.stderr) == (2, True), ended.stderr


def test_it_is_listed_with_its_package(run: Run) -> None:
    found = {(one["group"], one["name"]): one for one in json.loads(run("list", "--json").stdout)}
    assert found["tasks", "shout"]["package"] == "headrace-shout"
    assert found["engines", "shout.capitals"]["about"] == "Texts in capitals."
    assert found["sinks", "shelf"]["package"] == "headrace-shout"
    assert found["engines", "embed.torch"]["package"] == "headrace"
    assert all(one["problem"] is None for one in found.values())


def described(folder: Path, name: str, code: str, point: str, *, group: str = "engines", least: str = "0.1") -> Path:
    """The folder of a package of one module and one entry point, as pip would install it; building it takes seconds."""
    info = folder / "installed" / f"headrace_{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info.parent / f"headrace_{name}.py").write_text(code)
    facts = {"Metadata-Version": "2.1", "Name": f"headrace-{name}", "Version": "1.0"}
    facts["Requires-Dist"] = f"headrace>={least}"
    (info / "METADATA").write_text("".join(f"{field}: {value}\n" for field, value in facts.items()))
    (info / "entry_points.txt").write_text(f"[headrace.{group}]\n{point} = headrace_{name}:ENGINE\n")
    return info.parent


TAKING = """
from headrace import EngineOptions
from headrace.options import option
class ENGINE(EngineOptions):
    task, engine = "shout", "taking"
    workers: int = option(1, "Whose.")
"""


BROKEN = [
    (
        "raises",
        "raises",
        "0.1",
        "raise RuntimeError('boom')",
        "of package headrace-raises cannot be imported: Runt",
    ),
    ("exits", "exits", "0.1", "raise SystemExit(4)", "of package headrace-exits cannot be imported: SystemExit: 4"),
    ("newer", "newer", "99", "ENGINE = None", "of package headrace-newer needs headrace>=99"),
    ("twice", "capitals", "0.1", "ENGINE = None", "two packages register the engine 'shout.capitals'"),
    (
        "other",
        "other",
        "0.1",
        "ENGINE = 3",
        "of package headrace-other must be a class of EngineOptions with that task",
    ),
    ("else", "else", "0.1", "ENGINE = int", "of package headrace-else must be a class of EngineOptions"),
    (
        "taking",
        "taking",
        "0.1",
        TAKING,
        "of package headrace-taking has the option 'workers', which is a setting of jobs or servers",
    ),
]
"""Name, engine, the least version of Headrace, code, and what is said of it."""


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all of these packages are."""
    folder = tmp_path_factory.mktemp("broken")
    for name, engine, least, code, _ in BROKEN:
        described(folder, name, code, f"shout.{engine}", least=least)
    return folder / "installed"


@pytest.mark.parametrize(("engine", "message"), [(engine, message) for _, engine, _, _, message in BROKEN])
def test_a_broken_package_is_named(run: Run, broken: Path, engine: str, message: str) -> None:
    command = ("run", "-i", "docs.jsonl", "-o", "out.jsonl", "--task", "shout", "--engine", engine)
    ended = run(*command, also=(broken,))
    assert (ended.returncode, message in ended.stderr) == (2, True), ended.stderr
    assert "Traceback" not in ended.stderr


def test_broken_packages_cost_only_themselves(run: Run, broken: Path) -> None:
    listed = run("list", "engines", also=(broken,))
    assert (listed.returncode, "broken" in listed.stdout) == (0, True), listed.stdout
    assert [message for *_, message in BROKEN if message not in listed.stdout] == [], listed.stdout
    job = ("run", "-i", "docs.jsonl", "-o", "out.jsonl", "--engine", "headrace.testing:FakeEngine", "--task", "embed")
    fine = run(*job, also=(broken,))
    assert fine.returncode == 0, fine.stderr


def test_help_has_the_options_of_a_task_and_all_flags_also_beside_broken_packages(
    run: Run, broken: Path, tmp_path: Path
) -> None:
    alone = described(
        tmp_path, "solo", "from headrace import Task\nENGINE = Task(name='solo', output='out')", "solo", group="tasks"
    )
    for command in ("run", "serve", "tune"):
        whole = run(command, "--help-all", also=(broken, alone))
        assert (whole.returncode, "Flags of a task or an engine" in whole.stdout) == (0, True), whole.stderr
    assert "shout: --marks" in run("run", "--help-all", also=(alone,)).stdout
    own = run("run", "--task", "shout", "--help")
    assert "Flags of task shout by engine capitals:\n\n--marks  How many exclamation marks follow.\n" in own.stdout
    assert "--marks" not in run("run", "--help").stdout


def test_a_task_that_is_registered_by_another_name_is_told(run: Run, tmp_path: Path) -> None:
    other = described(
        tmp_path, "solo", "from headrace import Task\nENGINE = Task(name='solo', output='out')", "sole", group="tasks"
    )
    job = ("run", "-i", "docs.jsonl", "-o", "out.jsonl", "--task")
    said = run(*job, "solo", also=(other,)).stderr
    assert "unknown task 'solo'; known: " in said
    assert "did you mean sole?" in said
    assert "is called 'solo' itself; its package must register that name" in run(*job, "sole", also=(other,)).stderr


ROUTES = """
from headrace import EngineOptions, Task
from headrace.engines.custom import FunctionEngine
ENGINE = Task(name="solo", output="out", routes=ROUTES)
class Solo(EngineOptions):
    task, engine = "solo", "first"
    def load(self): return FunctionEngine(list, "first")
"""


@pytest.mark.parametrize(
    ("routes", "words"),
    [
        ("lambda state: []", "the routes of task 'solo' are a list: its function must return one FastAPI APIRouter"),
        ("lambda: None", "the routes of task 'solo' cannot be made: TypeError: "),
        ("'headrace_solo:rotes'", "the routes of task 'solo' cannot be made: 'headrace_solo:rotes': "),
    ],
)
def test_wrong_routes_of_a_task_are_told_and_cost_no_other_server(
    routes: str, words: str, run: Run, tmp_path: Path
) -> None:
    solo = described(tmp_path, "solo", ROUTES.replace("ROUTES", routes), "solo", group="tasks")
    with (solo / "headrace_solo-1.0.dist-info" / "entry_points.txt").open("a") as file:
        file.write("[headrace.engines]\nsolo.first = headrace_solo:Solo\n")
    ended = run("serve", "--task", "solo", "--port", "0", also=(solo,))
    assert (ended.returncode, words in ended.stderr) == (2, True), ended.stderr
    code = SERVE.replace('client.post("/echo", json=["a", "b c"])', 'client.post("/echo", json=[])')
    code = code.replace(", sorted(answer.json())", "").partition(", client")[0] + ")"
    assert run(code=code, also=(solo,)).stdout == "404\n"


def test_what_is_of_another_kind_is_listed_as_broken(run: Run, tmp_path: Path) -> None:
    groups = ("formats", "sources", "sinks", "exporters", "protocols", "clusters")
    for group in groups:
        odd = described(tmp_path, f"odd_{group}", "ENGINE = 3", "shout.odd", group=group)
    listed = run("list", also=(odd,)).stdout
    for group in groups:
        assert f"of package headrace-odd_{group} is a int; it must be a" in listed, listed
    code = SERVE.replace('client.post("/echo"', 'client.post("/score"').replace("sorted(answer", "type(answer")
    ended = run(code=code, also=(odd,))
    assert "served without a protocol: protocol 'shout.odd' of package headrace-odd_protocols" in ended.stderr


def test_a_format_without_a_reader_is_named(run: Run, tmp_path: Path) -> None:
    code = "from headrace.io.formats.known import Format\nENGINE = Format(name='mute', reader=None)"
    mute = described(tmp_path, "mute", code, "mute", group="formats")
    (tmp_path / "in.mute").write_text("")
    words = "format 'mute' of package headrace-mute: reader is None; it must be a function: mend or uninstall"
    ended = run("run", "-i", "in.mute", "-o", "out.jsonl", also=(mute,))
    assert (ended.returncode, words in ended.stderr) == (2, True), ended.stderr
    assert words in run("list", "formats", also=(mute,)).stdout


def test_a_package_cannot_take_the_name_of_one_of_headrace_s_own(run: Run, tmp_path: Path) -> None:
    taker = described(tmp_path, "taker", "ENGINE = 3", "jsonl", group="formats")
    job = ("run", "-i", "docs.jsonl", "-o", "out.jsonl", "--engine", "headrace.testing:FakeEngine", "--task", "embed")
    ended = run(*job, also=(taker,))
    assert ended.returncode == 0, ended.stderr
    listed = run("list", "formats", also=(taker,))
    assert "headrace-taker and headrace; headrace's own is used" in listed.stdout, listed.stdout


SERVE = """
from starlette.testclient import TestClient
import headrace
with TestClient(headrace.build_app(engine="headrace.testing:FakeEngine")) as client:
    answer = client.post("/echo", json=["a", "b c"])
    print(answer.status_code, sorted(answer.json()), client.post("/echo", json=[""]).json()["error"]["code"])
"""


def test_a_protocol_of_another_package_serves_every_engine(run: Run, tmp_path: Path) -> None:
    echo = installed(blocks("python")[1], blocks("toml")[1], tmp_path, "headrace_echo")
    ended = run(code=SERVE, also=(echo,))
    assert ended.stdout == "200 ['a', 'b c'] empty\n", ended.stderr
