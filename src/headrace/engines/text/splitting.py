"""What happens to texts that are too long for the model, and how their tokens are split. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tokenizers import Encoding

from headrace.engines.options import ChunkJoin, ChunkOptions, TooLong
from headrace.errors import ConfigError


@dataclass(frozen=True, slots=True)
class LongTexts:
    """What happens to texts that are too long for the model, as the options of an engine say, which are checked."""

    on_too_long: TooLong = "truncate"
    """Truncate it, fail its record, or split it into chunks."""
    chunk_overlap: int | None = None
    """Tokens that neighbouring chunks have in common; None for none."""
    chunk_join: ChunkJoin | None = None
    """How the outputs for the chunks become one; None for the default of the task."""

    @classmethod
    def of(cls, options: ChunkOptions) -> LongTexts:
        return cls(options.on_too_long, options.chunk_overlap, options.chunk_join)

    @property
    def splits(self) -> bool:
        return self.on_too_long == "split"

    def describe(self) -> dict[str, object]:
        """The settings that affect an output."""
        return {"on_too_long": self.on_too_long, **({"chunk_overlap": self.overlap} if self.splits else {})}

    @property
    def overlap(self) -> int:
        return self.chunk_overlap or 0

    def check_room(self, room: int) -> None:
        """Check that chunks with room for `room` tokens of a text advance.

        Raises:
            ConfigError: the overlap is as large.
        """
        if self.overlap >= room:
            raise ConfigError(
                f"``chunk_overlap`` is {self.overlap}: it must be less than the {room} tokens of a text that a chunk "
                "has room for"
            )

    def chunks(self, tokens: int, room: int) -> Iterator[slice]:
        """Where the chunks of a text are: each but the last has `room` tokens. `check_room` was called."""
        for start in range(0, max(tokens - self.overlap, 1), room - self.overlap):
            yield slice(start, min(start + room, tokens))


def joined_ids(sample: Encoding, parts: Sequence[list[int]]) -> tuple[list[int], list[int]]:
    """Ids and types of a text pair, with special tokens and types as in the sample pair."""
    ids: list[int] = []
    types: list[int] = []
    before: int | None = None
    for token, kind, sequence in zip(sample.ids, sample.type_ids, sample.sequence_ids, strict=True):
        part = [token] if sequence is None else parts[sequence] if sequence != before else []
        ids += part
        types += [kind] * len(part)
        before = sequence
    return ids, types


def tokens_before_text(prompt: Encoding) -> int:
    """The number of prompt tokens before a text, which some models exclude from pooling."""
    return len(prompt.ids) - (1 if prompt.special_tokens_mask[-1] else 0)
