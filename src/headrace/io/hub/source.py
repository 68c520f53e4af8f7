"""Datasets of the `datasets` library: on the Hugging Face Hub, saved to disk, or passed from Python."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from headrace.errors import ConfigError, raised_as
from headrace.extras import require
from headrace.io.base import SourcePlugin
from headrace.io.formats.arrow_tables import HeldArrow, HeldTable
from headrace.io.hub.names import DatasetAddress, is_dataset_address, parse_dataset
from headrace.io.sources.arrow_batches import ArrowBatches
from headrace.io.sources.held_tables import TableSource
from headrace.io.storage.rows import CHUNK_ROWS

if TYPE_CHECKING:
    import datasets
    import pyarrow as pa

_OPTIONS = ("config", "split", "columns")
"""What the address of a dataset that is read may name."""


class DatasetSource(TableSource):
    """The rows of a `datasets.Dataset`, with images and audio undecoded. Finished rows are not read."""

    def __init__(self, dataset: datasets.Dataset) -> None:
        plain = _undecoded(dataset)
        super().__init__("datasets", HeldDataset(plain.with_format("arrow")))
        # The original fingerprint: leaving images undecoded would change it.
        self._fingerprint = dataset._fingerprint

    def describe(self) -> Mapping[str, object]:
        """The library's fingerprint, which covers the content and all transformations."""
        return {"format": self._kind, "records": self.total_records, "fingerprint": self._fingerprint}


class HeldDataset(HeldTable):
    """A dataset whose rows come as tables of Arrow."""

    def __init__(self, dataset: datasets.Dataset) -> None:
        self.names: Sequence[str] = dataset.column_names
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def rows(self, start: int, stop: int) -> Sequence[object]:
        return HeldArrow(self._dataset[start:stop], start, "the dataset").rows(0, stop - start)

    def columns(self, names: Sequence[str], start: int, stop: int) -> Mapping[str, pa.Array | None]:
        return HeldArrow(self._dataset[start:stop]).columns(names, 0, stop - start)


def _load_saved(folder: Path) -> DatasetSource:
    """The dataset in a folder made by `save_to_disk`.

    Raises:
        ConfigError: it contains several splits, or is damaged.
        MissingExtraError: datasets is not installed.
    """
    datasets = _library()
    try:
        dataset = datasets.load_from_disk(str(folder))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the dataset in {folder}: {error}") from error
    if isinstance(dataset, datasets.DatasetDict):
        raise ConfigError(
            f"{folder} holds the splits {', '.join(dataset)}: name one, such as {folder / next(iter(dataset))}"
        )
    return DatasetSource(dataset)


def _pinned(name: str, begun: str | None) -> str:
    """The address with the commit that its revision is now, or was when the job was begun.

    Raises:
        ConfigError: the hub has no such dataset or revision, or refuses it.
    """
    if not is_dataset_address(name):
        return name
    address = parse_dataset(name, _OPTIONS)
    if address.commit is None and begun is not None and is_dataset_address(begun):
        known = parse_dataset(begun, _OPTIONS)
        if replace(known, revision=address.revision) == address:
            return begun
    return str(_with_commit(address))


def _with_commit(address: DatasetAddress) -> DatasetAddress:
    if address.commit is not None:
        return address
    _library()
    import huggingface_hub

    way_out = "check the name, the network and HF_ENDPOINT, or log in (hf auth login) for a private dataset"
    with raised_as(ConfigError, f"cannot read {address}", way_out):
        found = huggingface_hub.HfApi().dataset_info(address.name, revision=address.revision)
    return replace(address, revision=found.sha)


def _load_from_hub(address: DatasetAddress) -> ArrowBatches:
    """The rows of one split at one commit, streamed: nothing is downloaded to the disk.

    Raises:
        ConfigError: it cannot be read, or the address must name a configuration or split.
        MissingExtraError: datasets is not installed.
    """
    datasets = _library()
    address = _with_commit(address)
    with raised_as(ConfigError, f"cannot read {address}"):
        # The prefix keeps a local folder of the same name from being read.
        splits = datasets.load_dataset(
            f"hf://datasets/{address.name}", address.config, revision=address.revision, streaming=True
        )
    name = address.split or next(iter(splits))
    if name not in splits or (address.split is None and len(splits) > 1):
        example = replace(address, split=next(iter(splits)))
        raise ConfigError(f"{address} has the splits {', '.join(splits)}: name one, such as {example}")
    dataset = splits[name]
    info = (dataset.info.splits or {}).get(name)
    facts = {
        "format": "hub",
        "dataset": address.name,
        "commit": address.revision,
        "config": dataset.info.config_name,
        "split": name,
        "columns": list(address.columns),
    }

    def read() -> Iterator[pa.RecordBatch]:
        chosen = dataset.select_columns(list(address.columns)) if address.columns else dataset
        for table in chosen.with_format("arrow").iter(batch_size=CHUNK_ROWS):
            yield from table.combine_chunks().to_batches()

    return ArrowBatches(str(address), facts, info.num_examples if info else None, read)


def _library() -> ModuleType:
    library: ModuleType = require("datasets", "io", "a dataset")
    return library


def _undecoded(dataset: datasets.Dataset) -> datasets.Dataset:
    plain = dataset.with_format(None)
    for name, feature in dataset.features.items():
        if getattr(feature, "decode", False):
            plain = plain.cast_column(name, type(feature)(decode=False))
    return plain


def _open_dataset(dataset: object, _query: str | None) -> DatasetSource:
    if isinstance(dataset, Mapping):
        raise ConfigError(
            f"the input is of type {type(dataset).__name__}, with the splits {', '.join(dataset)}: give one of them, "
            f"such as dataset[{next(iter(dataset), 'train')!r}]"
        )
    return DatasetSource(dataset)


def _open_address(name: str, _query: str | None) -> ArrowBatches | None:
    return _load_from_hub(parse_dataset(name, _OPTIONS)) if is_dataset_address(name) else None


HUB = SourcePlugin(open=_open_address, pinned=_pinned, extra="io")
SAVED = SourcePlugin(open=lambda folder, _: _load_saved(Path(folder)), extra="io")
DATASET = SourcePlugin(open=_open_dataset, extra="io")
