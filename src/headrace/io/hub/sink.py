"""Pushes a job's output to a dataset on the Hugging Face Hub: Parquet shards, in one commit."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.errors import BrokenOffError, ConfigError, raised_as
from headrace.extras import require
from headrace.io.formats.kept_columns import check_parquet_column
from headrace.io.formats.parquet import ParquetWriter
from headrace.io.formats.writer import Layout
from headrace.io.hub.names import DatasetAddress, is_dataset_address, parse_dataset
from headrace.io.sinks.targets import SinkPlugin, Target
from headrace.io.storage.addresses import state_folder

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd, HfApi

SHARD_BYTES = 500_000_000
"""Size of the parts that become one shard."""

_SPLIT = re.compile(r"\w+(\.\w+)*", re.ASCII)


class HubWriter(ParquetWriter):
    """Parts are Parquet files in a local folder and stay there. At the end of the job they are merged and pushed.

    All shards go into one commit, under names that depend on their number alone. So a push that was cut off is repeated
    as a whole: the hub has either all shards of a job or none.

    Args:
        address: of the dataset; its revision is the branch.

    Raises:
        ConfigError: the revision is a commit, or no split may have that name.
        MissingExtraError: a library is not installed.
    """

    def __init__(self, address: DatasetAddress, folder: Path, layout: Layout) -> None:
        super().__init__(layout.column, layout.on_nan, folder)
        self._parts = folder
        if address.commit is not None:
            raise ConfigError(f"cannot write {address}: a commit cannot be changed; name a branch, or none")
        self._split = address.split or "train"
        if _SPLIT.fullmatch(self._split) is None:
            raise ConfigError(
                f"cannot write {address}: a split cannot be named {self._split!r}; use letters, digits, _ and ."
            )
        huggingface_hub = require("huggingface_hub", "io", "writing to the hub")
        self._address = address
        self._api: HfApi = huggingface_hub.HfApi()
        self._shard = re.compile(rf"data/{re.escape(self._split)}-\d{{5}}-of-\d{{5}}\.parquet")

    def check(self, *, begun: bool) -> None:
        """Check the access to the dataset before the job starts. Writes nothing.

        Args:
            begun: whether the job pushes what it has begun, or replaces the split on purpose.

        Raises:
            ConfigError: the hub cannot be reached or does not take the dataset, or has rows of others.
        """
        from huggingface_hub.errors import RepositoryNotFoundError

        with raised_as(
            ConfigError,
            f"cannot write {self._address}",
            "log in (hf auth login) or set HF_TOKEN, with a token that may write it",
        ):
            try:
                self._api.auth_check(self._address.name, repo_type="dataset", write=True)
            except RepositoryNotFoundError:
                self._api.whoami()  # the push will create it
                return
            if self._shards(self._address.revision) and not begun:
                raise ConfigError(
                    f"{self._address} has rows of the split {self._split!r} that no job here has "
                    "pushed; pass ``overwrite=True`` to replace them, or name another split (?split=NAME)"
                )

    def publish(self, parts: Callable[[], Sequence[Path]], scratch: Path) -> None:
        """Push the rows of all parts; the hub has them and no others when this returns.

        Raises:
            BrokenOffError: the hub has failed, or its dataset was changed meanwhile.
        """
        from huggingface_hub import CommitOperationDelete

        name = self._address.name
        with raised_as(
            BrokenOffError, f"cannot write {self._address}", f"the rows are in {self._parts}; run again to push them"
        ):
            self._api.create_repo(name, repo_type="dataset", private=True, exist_ok=True)
            head = self._api.dataset_info(name, revision=self._address.revision).sha
            added = list(self._uploaded(parts(), scratch))
            stale = set(self._shards(head)) - {one.path_in_repo for one in added}
            self._api.create_commit(
                name,
                [*added, *(CommitOperationDelete(path) for path in sorted(stale))],
                commit_message=f"Write split {self._split} with Headrace",
                repo_type="dataset",
                revision=self._address.revision,
                parent_commit=head,  # two jobs at a time would mix their shards
            )

    def _uploaded(self, parts: Sequence[Path], scratch: Path) -> Iterator[CommitOperationAdd]:
        """The shards, uploaded one after the other; only the commit makes them visible."""
        from huggingface_hub import CommitOperationAdd

        groups = list(_groups(parts))
        scratch.mkdir(parents=True, exist_ok=True)
        for number, group in enumerate(groups):
            names = f"data/{self._split}-{number:05d}-of-{len(groups):05d}.parquet"
            path = scratch / f"shard-{number:05d}.parquet"
            with path.open("wb") as file:
                self.merge(group, file)
            shard = CommitOperationAdd(names, str(path))
            self._api.preupload_lfs_files(
                self._address.name, [shard], repo_type="dataset", revision=self._address.revision
            )
            if shard.path_or_fileobj == b"":  # otherwise the commit itself has its content
                path.unlink()
            yield shard

    def _shards(self, revision: str | None) -> list[str]:
        files = self._api.list_repo_files(self._address.name, repo_type="dataset", revision=revision)
        return [path for path in files if self._shard.fullmatch(path)]


def _groups(parts: Sequence[Path]) -> Iterator[list[Path]]:
    """The parts of each shard, at least one shard."""
    group: list[Path] = []
    size = 0
    for part in parts:
        group.append(part)
        size += part.stat().st_size
        if size >= SHARD_BYTES:
            yield group
            group, size = [], 0
    if group or not parts:
        yield group


class HubSink(SinkPlugin):
    extra = "io"

    def target(self, name: str, format: str | None) -> Target | None:  # noqa: A002 - the flag's own word
        """The dataset that an address names; None for a file on the hub.

        Raises:
            ConfigError: there is another format than Parquet, or the address has unknown options.
        """
        if not is_dataset_address(name):
            return None
        if format not in (None, "parquet"):
            raise ConfigError(f"a dataset of the hub is written as Parquet: leave out {format!r}")
        address = parse_dataset(name, ("split",))
        folder = state_folder(str(address))
        return Target(
            folder,
            is_folder=True,
            format="parquet",
            make_writer=lambda layout: HubWriter(address, folder, layout),
            check_column=check_parquet_column,
            address=str(address),
        )


HUB = HubSink()
