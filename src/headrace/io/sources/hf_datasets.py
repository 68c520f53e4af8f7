"""Datasets of the `datasets` library, saved to disk or passed from Python."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from headrace.errors import ConfigError, MissingExtraError
from headrace.io.base import Chunk
from headrace.io.storage.files import CHUNK_ROWS, todo
from headrace.records import Record


class DatasetSource:
    """The rows of a `datasets.Dataset`, with images and audio undecoded. Finished rows are not read."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = _undecoded(dataset)
        self.total_records: int | None = len(dataset)
        self.total_bytes: int | None = None

    def describe(self) -> Mapping[str, object]:
        """The library's fingerprint, which covers the content and all transformations."""
        # The original fingerprint: leaving images undecoded would change it.
        return {"format": "datasets", "records": self.total_records, "fingerprint": self._dataset._fingerprint}

    def chunks(self, next_todo: Callable[[int], int]) -> Iterator[Chunk]:
        """Chunks of at most 512 rows."""
        total = len(self._dataset)
        for start in range(0, total, CHUNK_ROWS):
            positions = todo(start, min(start + CHUNK_ROWS, total), next_todo)
            columns = self._dataset[positions] if positions else {}
            names = list(columns)
            rows = zip(*columns.values(), strict=True)
            yield Chunk(
                [Record(at, at, dict(zip(names, row, strict=True))) for at, row in zip(positions, rows, strict=False)],
                (),
                0,
            )


def is_saved_dataset(folder: Path) -> bool:
    """Whether `save_to_disk` made the folder."""
    return (folder / "state.json").exists() or (folder / "dataset_dict.json").exists()


def load_saved(folder: Path) -> DatasetSource:
    """The dataset in a folder made by `save_to_disk`.

    Raises:
        ConfigError: it contains several splits, or is damaged.
        MissingExtraError: datasets is not installed.
    """
    try:
        import datasets
    except ImportError as error:
        raise MissingExtraError('a saved dataset needs datasets: pip install "headrace[io]"') from error
    try:
        dataset = datasets.load_from_disk(str(folder))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the dataset in {folder}: {error}") from error
    if isinstance(dataset, datasets.DatasetDict):
        raise ConfigError(
            f"{folder} holds the splits {', '.join(dataset)}: name one, such as {folder / next(iter(dataset))}"
        )
    return DatasetSource(dataset)


def is_dataset(rows: object) -> bool:
    """Whether it is a `datasets.Dataset` (an IterableDataset is an iterable like any other)."""
    return any(f"{kind.__module__}.{kind.__name__}" == "datasets.arrow_dataset.Dataset" for kind in type(rows).__mro__)


def _undecoded(dataset: Any) -> Any:
    plain = dataset.with_format(None)
    for name, feature in dataset.features.items():
        if getattr(feature, "decode", False):
            plain = plain.cast_column(name, type(feature)(decode=False))
    plain._fingerprint = dataset._fingerprint
    return plain
