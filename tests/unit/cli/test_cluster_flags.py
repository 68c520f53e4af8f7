"""Flags that go with --on, and those that do not."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import ANY

import pytest
from typer.testing import CliRunner

from headrace import plugins
from headrace.cli.app import app
from headrace.cli.cluster_flags import cluster_at
from headrace.cluster.base import Cluster, ClusterResources, Replicas
from headrace.errors import ConfigError


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Ray Serve itself, when it is imported
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["run", "--replicas", "2"], "need it"),
        (["run", "--cpus-per-replica", "2"], "need it"),
        (["retry", "out.jsonl", "--replicas", "2"], "need it"),
        (["run", "--on", "ray", "--dry-run"], "leave out --on"),
        (["run", "--data-parallel-size", "2", "--dry-run"], "leave out --on and --data-parallel-size"),
        (["run", "--data-parallel-size", "0"], "'0' is neither a number >= 1 nor auto"),
        (["run", "--data-parallel-size", "all"], "'all' is neither a number >= 1 nor auto"),
        (["run", "--data-parallel-size", "2", "--replicas", "2"], "need it"),
        (["run", "--data-parallel-size", "2", "--on", "ray:h:1"], "with --on, use --replicas"),
        (["run", "--data-parallel-size", "999"], "it must be at most"),
        (["run", "--data-parallel-size", "2", "--device", "cuda:0"], "--device cuda:0 is a single device"),
        (["run", "--on", "spark"], "--on is 'spark'; it must be ray"),
        (["run", "--on", "ray:headnode"], "'headnode' is not the address"),
        (["serve", "--on", "k8s"], "--on is 'k8s'; it must be ray"),
        (["serve", "--on", "ray", "--ssl-certfile", "cert.pem"], "leave out --ssl-certfile"),
        (["serve", "--on", "ray", "--min-replicas", "3"], "3 to 2"),
    ],
)
def test_what_does_not_go_together_is_said(flags: list[str], message: str, tmp_path: Path) -> None:
    if "ray" in "".join(flags) and "leave out" not in message:
        pytest.importorskip("ray", reason='needs Ray: pip install "headrace[ray]"')
    source = tmp_path / "in.jsonl"
    source.write_text('{"text": "a"}\n')
    files = ["-i", str(source), "-o", str(tmp_path / "out.jsonl")] if flags[0] == "run" else []
    ended = CliRunner().invoke(app, [flags[0], *files, *flags[1:]], env={"COLUMNS": "200"})
    assert ended.exit_code == 2
    assert message in " ".join(ended.output.replace("│", " ").split())
    assert not (tmp_path / "out.jsonl.parts").exists()


class Mine(Cluster):
    """Of another package."""


@pytest.mark.parametrize(
    ("on", "address"), [("mine", None), ("mine:head:1", "head:1"), ("mine://head:1", "mine://head:1")]
)
def test_a_cluster_of_another_package_is_asked_for_by_name_and_address(
    on: str, address: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = Mine()
    monkeypatch.setattr(plugins, "known", lambda _: {"mine": mine})
    monkeypatch.setattr(plugins, "load", lambda *_: mine)
    assert cluster_at(on) == (mine, address)
    with pytest.raises(ConfigError, match="Mine clusters run no servers"):
        mine.serve(ANY, Replicas(), ClusterResources(), ("127.0.0.1", 0), print)
