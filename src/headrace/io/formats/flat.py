"""Outputs with fields, written as columns: one for each field."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from headrace.columns import FinishedRows
from headrace.errors import RecordError
from headrace.records import Ok, Record, kind_of


@dataclass(frozen=True, slots=True)
class Fields:
    """The fields of an output that are columns of their own. To writers, all but the last are kept columns.

    Args:
        paths: where a field is in the output, by column: keys and places in lists, such as `labels.1`.
    """

    paths: Mapping[str, str]

    @classmethod
    def of(cls, paths: Sequence[tuple[str, str]], output: str, taken: Sequence[str]) -> Fields:
        """The fields, each in a column of its name, with the output's name before it if another column has that.

        Args:
            output: the column of the output.
            taken: the names of other columns.
        """
        return cls({f"{output}_{name}" if name in taken else name: path for name, path in paths})

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(self.paths)

    def row(self, ok: Ok) -> Ok:
        """A finished record whose kept columns are followed by the fields.

        Raises:
            RecordError: the output has no fields.
        """
        *others, last = self._values(ok.output)
        kept = {**(ok.record.data or {}), **dict(zip(self.columns, others, strict=False))}
        return replace(ok, record=Record(ok.record.position, ok.record.id, kept), output=last)

    def rows(self, finished: FinishedRows) -> FinishedRows:
        """The same of rows in columns. Raises as `row`."""
        values = [self._values(output) for output in finished.outputs]
        *others, last = ([row[place] for row in values] for place in range(len(self.paths)))
        kept = {**(finished.kept or {}), **dict(zip(self.columns, others, strict=False))}
        return replace(finished, kept=kept or None, outputs=last)

    def _values(self, output: object) -> list[object]:
        if isinstance(output, list) and output:  # several answers
            return list(map(list, zip(*map(self._values, output), strict=True)))
        if not isinstance(output, Mapping):
            raise RecordError(f"the output is {kind_of(output)}, which has no fields (``flatten``)")
        return [_at(output, path) for path in self.paths.values()]


def _at(output: Mapping[str, object], path: str) -> object:
    """The value that a path leads to; null if it leads nowhere."""
    if path in output:
        return output[path]
    value: object = output
    for key in path.split("."):
        if isinstance(value, Mapping):
            value = value.get(key)
        elif isinstance(value, list) and key.isdecimal():
            value = value[int(key)] if int(key) < len(value) else None
        else:
            return None
    return value
