"""A hub that cuts, lies or goes away, and downloads that are killed: a corrupt model is never loaded."""

from __future__ import annotations

from pathlib import Path

import huggingface_hub
import huggingface_hub.constants
import pytest
from tests.acceptance.command import headrace as run_command
from tests.integration.hub.killing import check, fetch, kill_downloads
from tests.integration.hub.standin import Hub

import headrace.models.hub
from headrace.errors import EngineError
from headrace.models.hub import HubModel

MEGABYTE = 1_000_000


def weights_in(cache: Path) -> list[Path]:
    return [path for path in cache.rglob("*.safetensors") if path.is_file()]


@pytest.mark.parametrize("stall_s", [0, 60])
def test_a_download_that_is_cut_or_stalls_goes_on_where_it_was(
    hub: Hub, encoder: Path, monkeypatch: pytest.MonkeyPatch, stall_s: float
) -> None:
    monkeypatch.setenv("HF_HUB_DOWNLOAD_TIMEOUT", "1")
    hub.faults.stall_s = stall_s
    hub.repository("acme/encoder").commit_folder(encoder)
    weights = (encoder / "model.safetensors").read_bytes()
    hub.faults.cut_after, hub.faults.cuts = MEGABYTE, 2
    with fetch("acme/encoder") as process:
        said, _ = process.communicate()
    assert process.returncode == 0
    assert (Path(said.strip()) / "model.safetensors").read_bytes() == weights
    assert hub.faults.cuts == 0
    assert hub.asked["model.safetensors"] > 1
    assert hub.sent.total() < 1.5 * sum(path.stat().st_size for path in encoder.iterdir())  # by ranges, not anew


def test_a_size_that_is_not_true_fails_and_nothing_is_kept_of_the_file(
    hub: Hub, encoder: Path, work: Path, cache: Path
) -> None:
    hub.repository("acme/encoder").commit_folder(encoder)
    hub.faults.longer = 10
    command = ("run", "--model", "acme/encoder", "-i", "x.jsonl", "-o", "y.jsonl")
    status, said = run_command(*command, folder=work)
    assert status == 2, said
    assert f"model 'acme/encoder': the download from {hub.url} broke off" in said.splitlines()[-1]
    assert not weights_in(cache)


def test_a_hub_that_is_gone_in_the_middle_is_named_and_the_next_run_goes_on(
    hub: Hub, sharded: Path, work: Path, cache: Path
) -> None:
    hub.repository("acme/sharded").commit_folder(sharded)
    hub.faults.gone_after = 12 * MEGABYTE
    command = ("run", "--model", "acme/sharded", "-i", "x.jsonl", "-o", "y.jsonl")
    status, said = run_command(*command, folder=work)
    assert status == 2, said
    assert f"model 'acme/sharded': the download from {hub.url} broke off" in said.splitlines()[-1]
    assert said.strip().endswith("complete files are kept: run the same command again to continue")
    complete = {path.name for path in weights_in(cache)}
    assert complete < {path.name for path in sharded.glob("*.safetensors")}
    hub.faults.gone_after = None
    hub.asked.clear()
    status, said = run_command(*command, folder=work)
    assert status == 0, said
    assert not complete & hub.asked.keys()


def test_a_partial_cache_without_a_network_is_not_loaded(
    hub: Hub, sharded: Path, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repository("acme/sharded").commit_folder(sharded)
    hub.faults.gone_after = 12 * MEGABYTE
    command = ("run", "--model", "acme/sharded", "-i", "x.jsonl", "-o", "y.jsonl")
    assert run_command(*command, folder=work)[0] == 2
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    status, said = run_command(*command, folder=work)
    assert status == 2
    assert "is not complete in the cache" in said and "HF_HUB_OFFLINE forbids downloads" in said


def test_a_hub_that_does_not_list_its_files_is_given_up(
    hub: Hub, encoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(headrace.models.hub, "LISTING_S", 0.2)
    commit = hub.repository("acme/encoder").commit_folder(encoder)
    hub.faults.tree_wait_s = 3
    with pytest.raises(EngineError, match=r"did not list its files in 0\.2 s"):
        HubModel("acme/encoder", "acme/encoder", None).download(commit, ["config.json"])


def test_killed_downloads_leave_nothing_corrupt_and_repeat_nothing_complete(hub: Hub, sharded: Path) -> None:
    folder, again = kill_downloads(hub, sharded, kills=8)
    check(folder, sharded)
    assert not again


def test_a_commit_that_is_none_is_refused(hub: Hub, work: Path, cache: Path) -> None:
    """It would be a path in the cache."""
    repository = hub.repository("acme/encoder")
    repository.commits["../../../evil"] = {"config.json": b"{}"}
    repository.branches["main"] = "../../../evil"
    command = ("run", "--model", "acme/encoder", "-i", "x.jsonl", "-o", "y.jsonl")
    status, said = run_command(*command, folder=work)
    assert status == 2
    assert "names '../../../evil' as its commit" in said
    assert not [*cache.parent.rglob("evil"), *work.rglob("evil")]
