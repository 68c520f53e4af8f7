"""Hostile inputs: small files by name, made with fixed seeds, and tables in memory, each with the settings of its jobs.

A file is a function that returns the files of a folder by name; one whose key is `in.*` alone is the source itself.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.hostile.tables import tables

Files = Mapping[str, bytes]


@dataclass(frozen=True)
class Case:
    """One job: a source, and what is asked for."""

    name: str
    files: Callable[[], Files]
    settings: Mapping[str, Any]
    """Keywords of `headrace.run`, with `sink` as a name in the folder and `limits` as the fields that differ."""
    table: Callable[[], Any] | None = None
    """Makes the source, if it is no file."""


@dataclass(frozen=True)
class Entry:
    """A source, and what its jobs may keep and need."""

    files: Callable[[], Files]
    keep: Sequence[str] = ("k",)
    always: Mapping[str, Any] = field(default_factory=dict)
    table: Callable[[], Any] | None = None


# What a job may ask for; each source has some of these, in turn.
FAKE, LISTS, COLUMNS = "headrace.testing:FakeEngine", "tests.hostile.engines:Lists", "tests.hostile.engines:Columns"
ASKED: list[dict[str, Any]] = [
    {"engine": COLUMNS, "sink": "out.jsonl", "keep": True},
    {"engine": COLUMNS, "sink": "out.parquet", "keep": True},
    {"engine": FAKE, "sink": "out.csv", "keep": True},
    {"engine": COLUMNS, "sink": "out.parquet", "id_column": ""},
    {"engine": LISTS, "sink": "out.jsonl", "keep": True, "limits": {"part_records": 3}},
    {"engine": COLUMNS, "sink": "out/", "output_format": "parquet", "keep": True, "limits": {"part_records": 4}},
    {"engine": FAKE, "sink": "out.parquet", "on_empty": "error", "keep": True, "limits": {"part_records": 2}},
    {"engine": COLUMNS, "sink": "out.tsv", "keep": True, "limits": {"part_records": 5}},
    {"engine": COLUMNS, "sink": "out/", "output_format": "jsonl", "on_nan": "error", "keep": True},
    {"engine": LISTS, "sink": "out.parquet", "keep": True},
    {"engine": COLUMNS, "sink": "out.jsonl", "id_column": "k"},
    {"engine": COLUMNS, "sink": "out.jsonl.gz", "shard": (1, 2), "keep": True},
]


def cases() -> Iterator[Case]:
    """All jobs, in a fixed order."""
    for name, entry in entries().items():
        number = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "big")
        for turn in range(1 if name.startswith("table/") and not name.endswith("-as-k") else 3):
            index = (number + 5 * turn) % len(ASKED)
            asked = {"task": "custom" if ASKED[index]["engine"] == LISTS else "embed", **ASKED[index], **entry.always}
            if not name.startswith(
                ("parquet/", "arrow/", "table/arrow/", "table/polars/")
            ):  # a column without a type has that of its part
                if asked["sink"].endswith(".parquet"):
                    asked.pop("limits", None)
                elif asked.get("output_format") == "parquet":
                    asked["output_format"] = "jsonl"
            if asked.pop("keep", False):
                asked["keep_columns"] = list(entry.keep)
            yield Case(f"{name}#{index}", entry.files, asked, entry.table)


def entries() -> dict[str, Entry]:
    """All sources by name."""
    found: dict[str, Entry] = {}
    for part in (json_values, json_lines, json_borders, json_columns, json_fuzzed, ids, csv_files, csv_fuzzed):
        found |= part()
    found |= compressed() | folders() | parquet_types() | parquet_files() | parquet_fuzzed() | arrow_files()
    return found | {
        name: Entry(dict, always={"id_column": None} if name.endswith("-as-id") else {}, table=make)
        for name, make in tables(columns()).items()
    }


def one(name: str, content: bytes) -> Callable[[], Files]:
    """A source of one file."""
    return lambda: {name: content}


def row(number: int, **values: Any) -> bytes:
    """A usual line."""
    return json.dumps({"id": number, "text": f"a text of number {number}", "k": number * 7, **values}).encode()


def among(*lines: bytes, before: int = 4, after: int = 3, end: bytes = b"\n") -> bytes:
    """Lines between usual ones."""
    usual = [row(number) for number in range(before + after)]
    return b"".join(line + end for line in (*usual[:before], *lines, *usual[before:]))


# -- JSON Lines -------------------------------------------------------------------------------------------------------

VALUES: dict[str, bytes] = {
    "null": b"null",
    "true": b"true",
    "negative-zero": b"-0",
    "negative-zero-float": b"-0.0",
    "one-as-float": b"1.0",
    "exponent": b"1E5",
    "tiny": b"5e-324",
    "underflow": b"1e-400",
    "overflow": b"1e400",
    "negative-overflow": b"-1e999",
    "many-digits": b"0.1000000000000000055511151231257827",
    "double-rounding": b"9007199254740993.0",
    "past-double": b"9007199254740993",
    "int64-most": b"9223372036854775807",
    "int64-past": b"9223372036854775808",
    "int64-least": b"-9223372036854775808",
    "int64-below": b"-9223372036854775809",
    "uint64-most": b"18446744073709551615",
    "uint64-past": b"18446744073709551616",
    "digits-400": b"9" * 400,
    "digits-5000": b"9" * 5000,
    "nan": b"NaN",
    "infinity": b"Infinity",
    "minus-infinity": b"-Infinity",
    "minus-nan": b"-NaN",
    "leading-zero": b"007",
    "plus": b"+1",
    "point-first": b".5",
    "point-last": b"1.",
    "hex": b"0x10",
    "exponent-empty": b"1e",
    "minus": b"-",
    "empty-text": b'""',
    "spaces": b'"  \\t "',
    "nul-escaped": b'"a\\u0000b"',
    "nul-raw": b'"a\0b"',
    "tab-raw": b'"a\tb"',
    "del": b'"a\x7fb"',
    "slash-escaped": b'"a\\/b\\b\\f"',
    "bad-escape": b'"a\\xb"',
    "short-escape": b'"a\\u12"',
    "surrogate-high": b'"a\\ud800b"',
    "surrogate-low": b'"a\\udc00b"',
    "surrogates-swapped": b'"\\udc00\\ud800"',
    "surrogate-pair": b'"\\ud83d\\ude00"',
    "surrogate-in-list": b'["\\ud800"]',
    "surrogate-raw": b'"\xed\xa0\x80"',
    "overlong": b'"\xc0\xaf"',
    "not-utf-8": b'"a\xffb"',
    "cut-utf-8": b'"\xc3"',
    "beyond-unicode": b'"\xf4\x90\x80\x80"',
    "separators": '"a\u2028b\u2029c\u0085d\x1ce"'.encode(),
    "mark-inside": b'"\xef\xbb\xbfa"',
    "astral": '"\U0001f600 \U0010ffff"'.encode(),
    "noncharacter": '"\uffff"'.encode(),
    "like-a-date": b'"2020-01-01"',
    "like-a-moment": b'"2020-01-01T12:34:56.789Z"',
    "like-a-moment-2": b'"2020-01-01 12:34:56"',
    "like-a-time": b'"12:34"',
    "like-a-number": b'"1"',
    "like-a-bool": b'"true"',
    "long-text": b'"' + b"long " * 20_000 + b'"',
    "empty-list": b"[]",
    "empty-object": b"{}",
    "list-of-nulls": b"[null, null]",
    "list-mixed": b'[1, "a", null, 1.5, [2]]',
    "list-int-float": b"[1, 2.5]",
    "list-big": b"[18446744073709551616]",
    "object": b'{"a": 1, "b": {"c": [1, 2]}}',
    "object-doubled": b'{"a": 1, "a": 2}',
    "object-odd-keys": b'{"": 1, "a.b": 2, "\\u0000": 3}',
    "object-surrogate-key": b'{"\\udfff": 1}',
    "deep-60": b"[" * 60 + b"]" * 60,
    "deep-objects": b'{"a":' * 100 + b"1" + b"}" * 100,
    "deep-300": b"[" * 300 + b"]" * 300,
    "deep-100000": b"[" * 100_000,
    "poison": b'"this is poison"',
}


def json_values() -> dict[str, Entry]:
    """Each value in each place of a row among usual rows."""
    found: dict[str, Entry] = {}
    places = {"text": b'{"id": 99, "text": %s, "k": 5}', "k": b'{"id": 99, "text": "a text", "k": %s}'}
    places |= {"id": b'{"id": %s, "text": "a text", "k": 5}', "other": b'{"id": 99, "text": "a text", "k": 5, "x": %s}'}
    for name, value in VALUES.items():
        for place, line in places.items():
            found[f"jsonl/value/{name}-in-{place}"] = Entry(one("in.jsonl", among(line.replace(b"%s", value))))
    return found


LINES: dict[str, list[bytes]] = {
    "cut": [b'{"id": 9, "text": "a'],
    "two-objects": [b'{"id": 9, "text": "a"} {"id": 10, "text": "b"}'],
    "two-objects-glued": [b'{"id": 9, "text": "a"}{"id": 10, "text": "b"}'],
    "trailing-comma": [b'{"id": 9, "text": "a",}'],
    "comment": [b'{"id": 9, "text": "a"} // note', b"# a note"],
    "single-quotes": [b"{'id': 9, 'text': 'a'}"],
    "no-quotes": [b'{id: 9, text: "a"}'],
    "list": [b'["a", "b"]', b"[]"],
    "scalars": [b"1", b'"a"', b"null", b"true", b"1.5"],
    "words": [b"nope", b"NaN", b"undefined"],
    "empty-object": [b"{}"],
    "doubled-key": [b'{"id": 9, "text": "a", "text": "b", "k": 1}'],
    "doubled-kept": [b'{"id": 9, "text": "a", "k": 1, "k": "x"}'],
    "doubled-id": [b'{"id": 9, "id": 10, "text": "a"}'],
    "doubled-other": [b'{"id": 9, "text": "a", "k": 1, "x": 1, "x": 2}'],
    "doubled-by-escape": [b'{"id": 9, "text": "a", "te\\u0078t": "b", "k": 1}'],
    "escaped-key": [b'{"\\u0069d": 9, "\\u0074ext": "a", "\\u006b": 1}'],
    "empty-key": [b'{"id": 9, "text": "a", "": 1}'],
    "surrogate-key": [b'{"id": 9, "text": "a", "\\ud800": 1}'],
    "nul-key": [b'{"id": 9, "text": "a", "\\u0000": 1}'],
    "key-not-text": [b'{"id": 9, "text": "a", 1: 1}'],
    "capital-keys": [b'{"ID": 9, "Text": "a", "K": 1}'],
    "no-id": [b'{"text": "a", "k": 1}'],
    "no-text": [b'{"id": 9, "k": 1}'],
    "no-kept": [b'{"id": 9, "text": "a"}'],
    "other-order": [b'{"k": 3, "text": "a", "id": 9}'],
    "more-columns": [b'{"id": 9, "text": "a", "k": 1, "new": [1, {"a": 2}]}'],
    "spaces-around": [b'  {"id": 9, "text": "a", "k": 1} \t '],
    "spaces-inside": [b'{ "id"\t:9 ,  "text" : "a","k":1 }'],
    "vertical-tab": [b'\x0b{"id": 9, "text": "a", "k": 1}'],
    "form-feed-line": [b"\x0c", b"\x0b \x1c", b" \t"],
    "nbsp-line": [b"\xc2\xa0"],
    "mark": [b'\xef\xbb\xbf{"id": 9, "text": "a", "k": 1}'],
    "nul-line": [b"\0\0\0"],
    "nul-behind": [b'{"id": 9, "text": "a", "k": 1}\0'],
    "not-utf-8": [b"\xff\xfe\xfd", b'{"id": 9, "text": "a", "\xff": 1}'],
    "carriage-return-inside": [b'{"id": 9,\r"text": "a", "k": 1}'],
    "carriage-return-behind": [b'{"id": 9, "text": "a", "k": 1}\r'],
    "carriage-returns-alone": [b'{"id": 9, "text": "a", "k": 1}\r{"id": 10, "text": "b", "k": 1}'],
    "blank-lines": [b"", b"", b"\r", b"   "],
    "kinds-of-text": [
        b'{"id": 9, "text": 5, "k": 1}',
        b'{"id": 10, "text": ["a", "b"], "k": 1}',
        b'{"id": 11, "text": {"a": 1}, "k": 1}',
        b'{"id": 12, "text": null, "k": 1}',
    ],
    "messages": [b'{"id": 9, "text": [{"role": "user", "content": "a"}], "k": 1}'],
    "poisons": [b'{"id": %d, "text": "poison of %d", "k": 1}' % (n, n) for n in range(20, 30)],
    "nans": [b'{"id": %d, "text": "nan of %d", "k": NaN}' % (n, n) for n in range(20, 24)],
}


def json_lines() -> dict[str, Entry]:
    """Odd lines among usual ones, alone, first and last; odd whole files."""
    found: dict[str, Entry] = {}
    for name, lines in LINES.items():
        found[f"jsonl/line/{name}"] = Entry(one("in.jsonl", among(*lines)))
        found[f"jsonl/first/{name}"] = Entry(one("in.jsonl", among(*lines, before=0, after=6)))
        found[f"jsonl/last/{name}"] = Entry(one("in.jsonl", among(*lines, before=6, after=0)[:-1]))
    usual = among()
    whole = {
        "empty": b"",
        "newline": b"\n",
        "blank": b"\n\n \r\n\t\n",
        "no-newline": usual[:-1],
        "crlf": usual.replace(b"\n", b"\r\n"),
        "crlf-mixed": usual.replace(b"\n", b"\r\n", 3),
        "mark": b"\xef\xbb\xbf" + usual,
        "mark-alone": b"\xef\xbb\xbf",
        "two-marks": b"\xef\xbb\xbf\xef\xbb\xbf" + usual,
        "all-bad": b"nope\n" * 20,
        "all-empty-objects": b"{}\n" * 5,
        "one-list": json.dumps([json.loads(line) for line in usual.splitlines()]).encode(),
        "over-several-lines": json.dumps(json.loads(row(1)), indent=1).encode(),
        "utf-16": usual.decode().encode("utf-16"),
        "latin-1": '{"id": 1, "text": "naïve"}\n{"id": 2, "text": "fine"}\n'.encode("latin-1"),
        "parquet-magic": b"PAR1\x15\x04" + usual,
        "gzip": gzip.compress(usual, mtime=0),
        "zeros": b"\0" * 4096,
        "random": random.Random(3).randbytes(5000),
        "every-line-another": b"\n".join(line for lines in LINES.values() for line in lines),
        "every-value-kept": b"\n".join(
            b'{"id": %d, "text": "a text", "k": %s}' % (n, value) for n, value in enumerate(VALUES.values())
        ),
        "every-value-as-text": b"\n".join(
            b'{"id": %d, "text": %s, "k": 1}' % (n, value) for n, value in enumerate(VALUES.values())
        ),
        "long-line": among(row(99, text="x" * 3_000_000)),
        "many-columns": among(row(99, **{f"c{n}": n for n in range(2000)})),
    }
    return found | {f"jsonl/whole/{name}": Entry(one("in.jsonl", content)) for name, content in whole.items()}


def _padded(number: int, size: int, odd: bytes = b"") -> bytes:
    """A line of exactly that many bytes, its newline included."""
    start = b'{"id": %d, "k": %d, "text": "%s' % (number, number, odd)
    return start + b"x" * (size - len(start) - 3) + b'"}\n'


def json_borders() -> dict[str, Entry]:
    """Lines that end, and letters that lie, just before, at and behind the borders of blocks."""
    found: dict[str, Entry] = {}
    odd = {"usual": b"", "letter": "ä😀".encode() * 2000, "bad": b'" nope', "surrogate": b"\\ud800", "crlf": b""}
    for kib in (256, 1024, 4096):
        border = kib * 1024
        for away in (-1, 0, 1):
            for name, text in odd.items():
                if kib > 256 and name in ("bad", "crlf") and away:
                    continue

                def content(border: int = border, away: int = away, name: str = name, text: bytes = text) -> Files:
                    size = 2048
                    lines = [_padded(number, size) for number in range(border // size - 10)]
                    left = border + away - size * len(lines)
                    if name in ("letter", "surrogate"):  # the letters, not the newline, lie across the border
                        begin = b'{"id": 5000, "k": 1, "text": "'
                        lines.append(begin + b"x" * (left - len(begin) - 3) + text + b'"}\n')
                    else:
                        lines.append(_padded(5000, left, text))
                    lines += [_padded(5001 + number, 700) for number in range(30)]
                    whole = b"".join(lines)
                    return {"in.jsonl": whole.replace(b"\n", b"\r\n") if name == "crlf" else whole}

                always = {"keep_columns": ["k"], "id_column": None, "limits": {}}
                found[f"jsonl/border/{kib}-KiB{away:+d}-{name}"] = Entry(content, always=always)
    for at in (0, 1, 510, 511, 512, 513, 1023, 1024, 4095, 4096, 4999):
        lines = [row(number) for number in range(5000)]
        lines[at] = b"nope"
        found[f"jsonl/border/bad-row-{at}"] = Entry(one("in.jsonl", b"\n".join(lines)), always={"limits": {}})
    return found


def json_columns() -> dict[str, Entry]:
    """Columns whose kind changes, early and late, and names that are odd or taken."""
    found: dict[str, Entry] = {}
    pairs: dict[str, tuple[Any, Any]] = {
        "int-text": (1, "1"),
        "int-float": (1, 1.5),
        "int-large-float": (9007199254740993, 0.5),
        "int-big": (1, 2**64),
        "float-int": (0.5, 3),
        "int-bool": (1, True),
        "null-int": (None, 1),
        "null-object": (None, {"a": 1}),
        "int-null": (1, None),
        "object-more-keys": ({"a": 1}, {"a": 1, "b": 2}),
        "object-other-keys": ({"a": 1}, {"b": "x"}),
        "object-other-order": ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        "object-null-key": ({"a": None}, {"a": {"b": 1}}),
        "object-text": ({"a": 1}, "x"),
        "list-text": ([1], "x"),
        "list-empty": ([], [1]),
        "list-kinds": ([1], ["x"]),
        "list-int-float": ([1], [0.5]),
        "list-of-objects": ([{"a": 1}], [{"b": 1}]),
        "date-text": ("2020-01-01", "yesterday"),
        "moment-text": ("2020-01-01 00:00:00", "2020-01-01T00:00:00+01:00"),
        "text-nul": ("a", "a\0b"),
    }
    for name, (first, second) in pairs.items():
        for at in (3, 700, 5000):
            lines = [row(number, k=first if number < at else second) for number in range(at + 4)]
            always = {} if at == 3 else {"limits": {"part_records": 600}}
            found[f"jsonl/kind/{name}-after-{at}"] = Entry(one("in.jsonl", b"\n".join(lines)), always=always)
        lines = [row(number, k=(first, second)[number % 2]) for number in range(9)]
        found[f"jsonl/kind/{name}-in-turn"] = Entry(one("in.jsonl", b"\n".join(lines)))
    late = [row(number) if number > 600 else b'{"id": %d, "text": "no k yet"}' % number for number in range(700)]
    found["jsonl/kind/column-comes-late"] = Entry(one("in.jsonl", b"\n".join(late)), always={"limits": {}})
    gone = [row(number) if number < 600 else b'{"id": %d, "text": "k is gone"}' % number for number in range(700)]
    found["jsonl/kind/column-goes"] = Entry(one("in.jsonl", b"\n".join(gone)), always={"limits": {}})
    names = [
        "",
        " ",
        "a.b",
        "a,b",
        'a"b',
        "a\nb",
        "Ä",
        "embedding",
        "error",
        "position",
        "file",
        "0",
        "__index_level_0__",
    ]
    for number, name in enumerate(names):
        lines = [row(n, **{name: n}) for n in range(6)]
        found[f"jsonl/name/{number}"] = Entry(one("in.jsonl", b"\n".join(lines)), keep=(name, "k"))
    found["jsonl/name/unknown"] = Entry(one("in.jsonl", among()), keep=("k", "never"))
    found["jsonl/name/id-and-text"] = Entry(one("in.jsonl", among()), keep=("id", "text", "k"))
    found["jsonl/name/twice"] = Entry(one("in.jsonl", among()), keep=("k", "k"))
    return found


def json_fuzzed(count: int = 60) -> dict[str, Entry]:
    """Lines made of pieces, and some bytes of them changed."""
    found: dict[str, Entry] = {}
    pieces = [*VALUES.values()]
    small = [value for value in pieces if len(value) < 500]
    for seed in range(count):
        dice = random.Random(seed)
        lines: list[bytes] = []
        for number in range(dice.choice((5, 40, 700))):
            line = row(number)
            if dice.random() < 0.1:
                line = b'{"id": %d, "text": "odd", "k": %s}' % (number, dice.choice(small))
            elif dice.random() < 0.05:
                line = b'{"id": %d, "text": %s, "k": 1}' % (number, dice.choice(small))
            elif dice.random() < 0.05:
                line = dice.choice(dice.choice(list(LINES.values())))
            elif dice.random() < 0.1:
                at = dice.randrange(len(line))
                line = line[:at] + bytes([dice.randrange(256)]) + line[at + dice.randrange(2) :]
            lines.append(line)
        end = dice.choice((b"\n", b"\n", b"\r\n", b"\n\n"))
        found[f"jsonl/fuzzed/{seed}"] = Entry(one("in.jsonl", end.join(lines) + dice.choice((b"", end))))
    return found


# -- ids --------------------------------------------------------------------------------------------------------------


def ids() -> dict[str, Entry]:
    """Columns of ids."""
    many = list(range(3000))
    columns: dict[str, Sequence[Any]] = {
        "int-and-text": [1, "1", 2, "2", "three"],
        "int-and-float": [1, 1.0, 2, 2.0],
        "int-and-float-different": [1, 2.5, 3, 4.0],
        "bool-and-int": [True, 1, False, 0],
        "null": [1, None, 3, None],
        "all-null": [None] * 5,
        "doubled-near": [1, 2, 2, 3],
        "doubled-text": ["a", "b", "a"],
        "doubled-null": [None, None],
        "doubled-far": [*many, 5],
        "doubled-across-chunks": [*many[:511], 511, 511, *many[513:600]],
        "doubled-by-kind": ["a", 1, "a"],
        "list": [[1], [2]],
        "object": [{"a": 1}, {"a": 2}],
        "float": [0.5, 1.5, 1e300],
        "large": [2**63, 2**64, -(2**63), 2**200],
        "large-doubled": [2**64, 1, 2**64],
        "negative": [-1, -2, 0],
        "empty-text": ["", "a"],
        "empty-text-doubled": ["", ""],
        "surrogate": ["a", "\ud800", "b"],
        "nul": ["a\0", "a"],
        "composed": ["\u00e9", "e\u0301"],
        "long": ["x" * 100_000, "x" * 99_999],
        "text-many": [f"r{n}" for n in many],
        "text-many-doubled": [*(f"r{n}" for n in many), "r17"],
        "like-dates": ["2020-01-01", "2020-01-02", "2020-01-01T00:00:00"],
        "late-text": [*many, "x", *range(4000, 4005)],
        "late-null": [*many, None, *range(4000, 4005)],
        "late-missing": [*many, ..., 5000],
        "missing-first": [..., 1, 2],
        "missing-all": [...] * 4,
    }
    found: dict[str, Entry] = {}
    for name, values in columns.items():
        lines = [
            json.dumps({**({} if value is ... else {"id": value}), "text": f"text {n}", "k": n}).encode()
            for n, value in enumerate(values)
        ]
        found[f"jsonl/ids/{name}"] = Entry(one("in.jsonl", b"\n".join(lines)), always={"id_column": None})
        found[f"jsonl/ids/{name}-named"] = Entry(one("in.jsonl", b"\n".join(lines)), always={"id_column": "id"})
    return found


# -- CSV --------------------------------------------------------------------------------------------------------------

CELLS = [
    "007", "1e5", "-0", "NaN", "nan", "NA", "N/A", "null", "NULL", "None", "true", "False", "", '""', "  x  ", "1,5",
    "2020-01-01", "2020-01-01 12:34:56", "12:34", "0x10", "9223372036854775808", "1_000", "+1", ".5", "1.",
    "inf", "#N/A", "\\N", "\\n", "a\\,b", "'a,b'", "ä", "\u2028", "\x85", "\x0b", "\x0c", "\x1c", "a\0b",
    "\ufeff", "x" * 140_000, "-", "=1+1",
]  # fmt: skip


def csv_files() -> dict[str, Entry]:
    """Odd cells, quotes, lines and headers."""

    def quoted(text: str) -> str:
        return '"' + text.replace('"', '""') + '"' if any(sign in text for sign in ',"\r\n') else text

    usual = "".join(f"{n},text {n},{n * 7}\n" for n in range(6))
    head = "id,text,k\n"
    files: dict[str, str | bytes] = {}
    for number, cell in enumerate(CELLS):
        for place, line in {"k": f"9,a text,{quoted(cell)}\n", "text": f"9,{quoted(cell)},1\n"}.items():
            files[f"cell-{number}-in-{place}"] = head + usual + line + "10,more,2\n"
        files[f"cell-{number}-quoted"] = head + usual + f'9,a text,"{cell}"\n'
    files |= {
        "all-cells": head + "".join(f"{n},a text,{quoted(cell)}\n" for n, cell in enumerate(CELLS)),
        "cells-as-ids": head + "".join(f"{quoted(cell)},a text,{n}\n" for n, cell in enumerate(CELLS)),
        "empty": "",
        "newline": "\n",
        "header-only": head,
        "header-cut": head[:-1],
        "blank-lines": head + "\n\n" + usual + "\n  \n\r\n" + "9,a,1\n",
        "no-final-newline": (head + usual)[:-1],
        "crlf": (head + usual).replace("\n", "\r\n"),
        "crlf-mixed": head + usual.replace("\n", "\r\n", 3),
        "carriage-returns": (head + usual).replace("\n", "\r"),
        "carriage-return-once": head + usual.replace("\n", "\r", 1),
        "mark": "\ufeff" + head + usual,
        "mark-twice": "\ufeff\ufeff" + head + usual,
        "mark-quoted": '\ufeff"id",text,k\n' + usual,
        "newline-in-field": head + '9,"a\nb\r\nc",1\n' + usual,
        "newlines-many": head + "".join(f'{n},"a{chr(10) * n}b",{n}\n' for n in range(20)),
        "blank-line-in-field": head + '9,"a\n\n\nb",1\n' + usual,
        "quotes-doubled": head + '9,"a ""b"" c",1\n' + usual,
        "quote-inside": head + '9,a "b" c,1\n' + usual,
        "quote-then-text": head + '9,"a"b,1\n' + usual,
        "quote-then-space": head + '9,"a" ,1\n' + usual,
        "space-then-quote": head + '9, "a, b",1\n' + usual,
        "quote-open": head + usual + '9,"a,1\n' + "".join(f"{n},later {n},1\n" for n in range(20, 26)),
        "quote-open-last": head + usual + '9,"a,1',
        "quote-open-twice": head + '8,"a,1\n' + usual + '9,"b,1\n' + "20,later,1\n",
        "width-more": head + usual + "9,a,1,2\n" + "10,b,1\n",
        "width-less": head + usual + "9,a\n" + "10,b,1\n",
        "width-one": head + usual + "9\n" + "10,b,1\n",
        "width-first": head + "9,a\n" + usual,
        "commas-alone": head + usual + ",,\n" + "10,b,1\n",
        "header-doubled": "id,text,k,k\n" + "1,a,2,3\n",
        "header-doubled-text": "id,text,text\n" + "1,a,b\n",
        "header-empty-name": "id,text,k,\n" + "1,a,2,3\n",
        "header-spaces": " id , text ,k\n" + "1,a,2\n",
        "header-quoted": '"id","text","k"\n' + usual,
        "header-newline": '"i\nd",text,k\n' + usual,
        "header-missing": usual,
        "header-capital": "ID,Text,K\n" + usual,
        "header-numbers": "0,1,2\n" + usual,
        "semicolons": (head + usual).replace(",", ";"),
        "tabs": (head + usual).replace(",", "\t"),
        "one-column": 'text\na\n\nb\n""\n c\n',
        "many-columns": ",".join(["id", "text", "k", *(f"c{n}" for n in range(1000))]) + "\n" + "1,a,2" + ",x" * 1000,
        "many-rows": head + "".join(f"{n},text {n},{n}\n" for n in range(5000)),
        "many-rows-bad-one": head + "".join(f"{n},text {n},{n}\n" if n != 3333 else "3333\n" for n in range(5000)),
        "many-rows-late-quote": head + "".join(f"{n},text {n},{n}\n" for n in range(4000)) + '4000,"a\nb",1\n',
        "latin-1": (head + "1,naïve,2\n2,fine,3\n").encode("latin-1"),
        "not-utf-8-kept": head.encode() + b"1,a,\xff\n2,b,3\n",
        "not-utf-8-other": b"id,text,k,x\n1,a,1,\xff\n2,b,3,c\n",
        "not-utf-8-header": b"id,text,k,\xff\n1,a,1,2\n",
        "nul-line": head.encode() + usual.encode() + b"\0\n9,a,1\n",
        "cut-utf-8-last": head.encode() + b"1,a,2\n2,\xc3",
        "utf-16": (head + usual).encode("utf-16"),
        "zeros": b"\0" * 2000,
        "poison": head + usual + "9,poison,1\n10,more,2\n",
        "ids-doubled": head + usual + "3,again,1\n",
        "ids-zero-led": head + "1,a,1\n01,b,2\n1.0,c,3\n 1,d,4\n",
        "ids-empty": head + ",a,1\n,b,2\n",
    }
    for kib in (256, 1024):
        for away in (-1, 0, 1):
            line = "{},{},7\n"
            body = head + "".join(line.format(100 + n, "x" * 1000) for n in range(kib - 4))
            left = kib * 1024 + away - len(body) - len(line.format(9999, "")) - 6
            body += line.format(9999, '"' + "y" * (left // 2) + '\n""' + "y" * (left - left // 2 + 1) + '"')
            files[f"border-{kib}-KiB{away:+d}"] = body + usual.replace("text", "after")
            files[f"border-letter-{kib}-KiB{away:+d}"] = body[: kib * 1024 + away - 1] + "ä😀" + '"\n'
    encoded = {name: text if isinstance(text, bytes) else text.encode() for name, text in files.items()}
    found = {f"csv/{name}": Entry(one("in.csv", content)) for name, content in encoded.items()}
    tsv = {name: content.replace(b",", b"\t") for name, content in encoded.items() if "cell" not in name}
    return found | {f"tsv/{name}": Entry(one("in.tsv", content)) for name, content in list(tsv.items())[::3]}


def csv_fuzzed(count: int = 40) -> dict[str, Entry]:
    """Cells of odd signs, quoted at random, sometimes wrongly."""
    found: dict[str, Entry] = {}
    for seed in range(count):
        dice = random.Random(1000 + seed)
        signs = 'ab ä,"\n\t\r' if seed % 2 else "ab ä,1.-"
        end = dice.choice(("\n", "\n", "\r\n"))
        lines = ["id,text,k"]
        for number in range(dice.choice((6, 60, 800))):
            cells = [str(number)]
            for _ in range(2):
                cell = "".join(dice.choice(signs) for _ in range(dice.randrange(7)))
                needs = dice.random() < 0.2 or any(sign in cell for sign in ',"\n\r')
                cells.append('"' + cell.replace('"', '""') + '"' if needs and dice.random() < 0.97 else cell)
            if dice.random() < 0.03:
                cells = cells[: dice.randrange(1, 4)] + ["more"] * dice.randrange(2)
            lines.append(",".join(cells))
        found[f"csv/fuzzed/{seed}"] = Entry(one("in.csv", (end.join(lines) + end).encode()))
    return found


# -- compressed, wrongly named, folders -------------------------------------------------------------------------------


def zstd(content: bytes) -> bytes:
    """A Zstandard frame."""
    import pyarrow as pa

    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(content)
    return bytes(sink.getvalue())


def compressed() -> dict[str, Entry]:
    """Compressed files: whole, in pieces, cut, damaged, and named for what they are not."""
    usual, table = among(before=700), b"id,text,k\n" + b"".join(b"%d,text %d,1\n" % (n, n) for n in range(700))
    gz, zst = gzip.compress(usual, mtime=0), zstd(usual)
    spoilt = bytearray(gz)
    spoilt[len(spoilt) // 2] ^= 255
    files = {
        "whole.jsonl.gz": gz,
        "whole.csv.gz": gzip.compress(table, mtime=0),
        "members.jsonl.gz": gzip.compress(usual[:1000], mtime=0) + gzip.compress(usual[1000:], mtime=0),
        "cut.jsonl.gz": gz[: len(gz) // 2],
        "cut-end.jsonl.gz": gz[:-4],
        "cut-head.jsonl.gz": gz[:5],
        "spoilt.jsonl.gz": bytes(spoilt),
        "behind.jsonl.gz": gz + b"garbage",
        "zeros-behind.jsonl.gz": gz + b"\0" * 512,
        "empty.jsonl.gz": gzip.compress(b"", mtime=0),
        "no-bytes.jsonl.gz": b"",
        "not.jsonl.gz": usual,
        "whole.jsonl.zst": zst,
        "frames.jsonl.zst": zstd(usual[:1000]) + zstd(usual[1000:]),
        "cut.jsonl.zst": zst[: len(zst) // 2],
        "not.jsonl.zst": usual,
        "cut.csv.zst": zstd(table)[:-20],
        "not.csv.gz": table,
        "gzip.jsonl": gz,
        "table.jsonl": table,
        "lines.csv": usual,
        "lines.parquet": usual,
        "lines.arrow": usual,
        "table.tsv": table,
        "lines.txt": usual,
        "lines.JSONL": usual,
        "lines.json": usual,
        "empty.parquet": b"",
        "empty.arrow": b"",
    }
    return {f"named/{name}": Entry(one("in." + name.partition(".")[2], content)) for name, content in files.items()}


def folders() -> dict[str, Entry]:
    """Folders of several files."""
    first, second = among(before=3, after=0), b"".join(row(n) + b"\n" for n in range(10, 14))
    table = b"id,text,k\n20,from a table,x\n21,another,2\n"
    return {
        "folder/two": Entry(lambda: {"a.jsonl": first, "b.jsonl": second}),
        "folder/no-newline-between": Entry(lambda: {"a.jsonl": first[:-1], "b.jsonl": second}),
        "folder/empty-between": Entry(lambda: {"a.jsonl": first, "b.jsonl": b"", "c.jsonl": second}),
        "folder/formats": Entry(
            lambda: {"a.jsonl": first, "b.csv": table, "c.parquet": parquet({"id": [30], "text": ["p"], "k": [1]})}
        ),
        "folder/same-ids": Entry(lambda: {"a.jsonl": first, "b.jsonl": first}),
        "folder/hidden": Entry(lambda: {"a.jsonl": first, ".b.jsonl": second, "_c.jsonl": second, "notes.md": b"x"}),
        "folder/hive": Entry(lambda: {"year=2024/a.jsonl": first, "year=2025/b.jsonl": second}, keep=("k", "year")),
        "folder/hive-none": Entry(
            lambda: {"k=x/a.jsonl": first, "k=__HIVE_DEFAULT_PARTITION__/b.jsonl": second}, keep=("k",)
        ),
        "folder/columns-differ": Entry(lambda: {"a.csv": b"id,text\n1,a\n", "b.csv": table}),
        "folder/types-differ": Entry(
            lambda: {
                "a.parquet": parquet({"id": [1, 2], "text": ["a", "b"], "k": [1, 2]}),
                "b.parquet": parquet({"id": ["x"], "text": ["c"], "k": ["y"]}),
            }
        ),
        "folder/types-widen": Entry(
            lambda: {
                "a.parquet": parquet({"id": [1, 2], "text": ["a", "b"], "k": [1, 2]}),
                "b.parquet": parquet({"id": [3], "text": ["c"], "k": [0.5]}),
            }
        ),
        "folder/parquet-bad-one": Entry(
            lambda: {"a.parquet": parquet({"id": [1], "text": ["a"], "k": [1]}), "b.parquet": b"PAR1nope"}
        ),
        "folder/empty": Entry(lambda: {"sub/.keep": b""}),
    }


# -- Parquet and Arrow ------------------------------------------------------------------------------------------------


def parquet(columns: Mapping[str, Any], **options: Any) -> bytes:
    """A Parquet file of these columns."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    buffer = io.BytesIO()
    pq.write_table(pa.table(dict(columns)), buffer, **options)
    return buffer.getvalue()


def arrow(columns: Mapping[str, Any], *, stream: bool = False, rows: int = 3) -> bytes:
    """An Arrow file of these columns, in batches of a few rows."""
    import pyarrow as pa
    import pyarrow.ipc

    table, buffer = pa.table(dict(columns)), io.BytesIO()
    with (pa.ipc.new_stream if stream else pa.ipc.new_file)(buffer, table.schema) as writer:
        writer.write_table(table, max_chunksize=rows)
    return buffer.getvalue()


def columns() -> dict[str, Any]:
    """Columns of four values of every type, by name."""
    import datetime
    import decimal

    import numpy as np
    import pyarrow as pa

    def ints(kind: Any, *values: int | None) -> Any:
        return pa.array(values, pa.int64() if kind.bit_width == 64 else pa.int32()).cast(kind)

    def texts(*values: bytes) -> Any:
        ends = np.cumsum([0, *map(len, values)]).astype("i4")
        return pa.Array.from_buffers(
            pa.string(), len(values), [None, pa.py_buffer(ends.tobytes()), pa.py_buffer(b"".join(values))]
        )

    moment = 1234567890123456789
    found: dict[str, Any] = {str(kind): pa.array([1, None, 100, 0], kind) for kind in (
        pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64(),
    )}  # fmt: skip
    found |= {
        "int64-ends": pa.array([2**63 - 1, -(2**63), 0, None]),
        "uint64-most": pa.array([2**64 - 1, 2**63, 0, None], pa.uint64()),
        "float16": pa.array(np.array([0.5, -0.0, np.nan, np.inf], np.float16)),
        "float32": pa.array([0.1, -0.0, float("nan"), None], pa.float32()),
        "float64": pa.array([0.1, -0.0, float("nan"), float("-inf")], pa.float64()),
        "bool": pa.array([True, None, False, True]),
        "null": pa.nulls(4),
        "string": pa.array(["a", "", None, 'a\0b\n,"']),
        "large-string": pa.array(["a", "", None, "ä"], pa.large_string()),
        "string-view": pa.array(["a", "", None, "a text that is longer than twelve"], pa.string_view()),
        "not-utf-8": texts(b"a", b"\xff\xfe", b"b", b"c"),
        "surrogate-bytes": texts(b"a", b"\xed\xa0\x80", b"b", b"c"),
        "binary": pa.array([b"a", b"", None, b"\xff"]),
        "fixed-binary": pa.array([b"abc", b"\xff\0a", None, b"xyz"], pa.binary(3)),
        "decimal": pa.array(
            [decimal.Decimal("1.50"), None, decimal.Decimal("-0.01"), decimal.Decimal(0)], pa.decimal128(9, 2)
        ),
        "decimal256": pa.array(
            [decimal.Decimal(10) ** 50, None, decimal.Decimal(1), decimal.Decimal(0)], pa.decimal256(60, 2)
        ),
        "date32": ints(pa.date32(), 1, None, -1, 10**9),
        "date64": ints(pa.date64(), 86_400_000, None, 0, 86_400_000),
        "time32": ints(pa.time32("ms"), 1001, None, 0, 2),
        "time64": ints(pa.time64("ns"), 1001, None, 0, 1000),
        "moment-s": ints(pa.timestamp("s"), 1, None, 0, -1),
        "moment-ms-far": ints(pa.timestamp("ms"), 1, None, 10**17, -1),
        "moment-us": ints(pa.timestamp("us"), 1001, None, 0, -1),
        "moment-ns": ints(pa.timestamp("ns"), moment, None, 0, -1),
        "moment-ns-utc": ints(pa.timestamp("ns", "UTC"), moment, None, 0, -1),
        "moment-tokyo": ints(pa.timestamp("us", "Asia/Tokyo"), 1, None, 0, -1),
        "moment-offset": ints(pa.timestamp("ns", "+05:30"), moment, None, 0, -1),
        "moment-nowhere": ints(pa.timestamp("us", "No/Where"), 1, None, 0, -1),
        "duration-us": ints(pa.duration("us"), 5, None, 0, -1),
        "duration-ns": ints(pa.duration("ns"), 5, None, 0, -1),
        "dictionary": pa.array(["a", "b", None, "a"]).dictionary_encode(),
        "dictionary-of-ints": pa.array([5, 6, None, 5]).dictionary_encode(),
        "list": pa.array([[1, 2], [], None, [None]], pa.list_(pa.int64())),
        "list-of-float32": pa.array([[0.1], [], None, [float("nan")]], pa.list_(pa.float32())),
        "large-list": pa.array([["a"], [], None, [None]], pa.large_list(pa.string())),
        "fixed-list": pa.array([[1, 2], None, [3, 4], [5, None]], pa.list_(pa.int32(), 2)),
        "list-of-ns": pa.array([[1001], [], None, [0]], pa.list_(pa.time64("ns"))),
        "struct": pa.array([{"a": 1, "b": "x"}, {"a": None, "b": None}, None, {"a": 2, "b": "y"}]),
        "struct-nested": pa.array([{"a": {"b": [1, {"c": 2}][:1]}}, None, {"a": None}, {"a": {"b": []}}]),
        "struct-ns": pa.array([{"t": moment}, None, {"t": None}, {"t": 0}], pa.struct([("t", pa.timestamp("ns"))])),
        "map": pa.array([[("k", 1)], [], None, [("k", None)]], pa.map_(pa.string(), pa.int64())),
        "list-not-utf-8": pa.ListArray.from_arrays(
            pa.array([0, 1, 2, 3, 4], pa.int32()), texts(b"a", b"\xff", b"b", b"c")
        ),
        "dates-as-text": pa.array([datetime.date(2020, 1, 1).isoformat()] * 4),
    }
    return found


def parquet_types() -> dict[str, Entry]:
    """Every type, kept; those that may be so, as text and as id."""
    found: dict[str, Entry] = {}

    def table(**given: Any) -> Callable[[], Files]:
        return lambda: {
            "in.parquet": parquet(
                {"id": [1, 2, 3, 4], "text": ["a", "bb", "ccc", "d e"], "k": [11, 12, 13, 14]} | given
            )
        }

    for name, values in columns().items():
        found[f"parquet/kept/{name}"] = Entry(table(k=values))
        found[f"parquet/text/{name}"] = Entry(table(text=values))
        found[f"parquet/other/{name}"] = Entry(table(x=values))
        found[f"parquet/id/{name}"] = Entry(table(id=values), always={"id_column": None})
    return found


def parquet_files() -> dict[str, Entry]:
    """Odd files: groups, names, damage."""
    import pyarrow as pa

    many = {"id": list(range(3000)), "text": [f"text {n}" for n in range(3000)], "k": [n % 7 for n in range(3000)]}
    few = {"id": [1, 2, 3], "text": ["a", "b", "c"], "k": [7, 8, 9]}
    whole = parquet(many, row_group_size=500)
    spoilt = bytearray(whole)
    spoilt[len(spoilt) // 3] ^= 255
    nulls = [None if n % 3 else n for n in range(3000)]
    files: dict[str, Callable[[], bytes]] = {
        "many": lambda: whole,
        "small-groups": lambda: parquet(many, row_group_size=7),
        "groups-of-one": lambda: parquet({name: values[:40] for name, values in many.items()}, row_group_size=1),
        "one-large-group": lambda: parquet({name: values * 1 for name, values in many.items()}),
        "zero-rows": lambda: parquet(
            {name: pa.array(values[:0], pa.array(values).type) for name, values in many.items()}
        ),
        "zero-row-groups": lambda: _zero_row_groups(few),
        "zero-columns": lambda: parquet({}),
        "no-text": lambda: parquet({"id": [1], "k": [2]}),
        "no-id": lambda: parquet({"text": ["a", "b"], "k": [1, 2]}),
        "doubled-names": lambda: _table([("id", [1]), ("text", ["a"]), ("k", [1]), ("k", [2])]),
        "doubled-text": lambda: _table([("id", [1]), ("text", ["a"]), ("text", ["b"]), ("k", [2])]),
        "odd-names": lambda: parquet({**few, "": [1, 2, 3], "a.b": [1, 2, 3], "ä\n": [1, 2, 3]}),
        "name-taken": lambda: parquet({**few, "embedding": [1, 2, 3]}),
        "cut": lambda: whole[:-100],
        "cut-start": lambda: whole[100:],
        "no-magic": lambda: b"XXXX" + whole[4:],
        "spoilt": lambda: bytes(spoilt),
        "magic-alone": lambda: b"PAR1PAR1",
        "nulls": lambda: parquet(many | {"k": nulls}, row_group_size=500),
        "null-ids": lambda: parquet(many | {"id": nulls}, row_group_size=500),
        "null-texts": lambda: parquet(many | {"text": [None if n % 5 else f"t {n}" for n in range(3000)]}),
        "doubled-ids": lambda: parquet(many | {"id": [*range(2999), 5]}, row_group_size=500),
        "doubled-ids-across-groups": lambda: parquet(
            many | {"id": [*range(501), 500, *range(502, 3000)]}, row_group_size=501
        ),
        "text-ids": lambda: parquet(many | {"id": [f"r{n}" for n in range(3000)]}, row_group_size=500),
        "text-ids-doubled": lambda: parquet(many | {"id": [f"r{n % 2999}" for n in range(3000)]}),
        "dictionary-ids": lambda: parquet(many | {"id": pa.array([f"r{n}" for n in range(3000)]).dictionary_encode()}),
        "dictionary-texts": lambda: parquet(
            many | {"text": pa.array([f"t {n % 9}" for n in range(3000)]).dictionary_encode()}
        ),
        "poisons": lambda: parquet(many | {"text": [f"poison {n}" if n % 500 == 3 else f"t {n}" for n in range(3000)]}),
        "nans": lambda: parquet(many | {"k": [float("nan") if n % 100 == 3 else 0.5 for n in range(3000)]}),
        "empty-texts": lambda: parquet(many | {"text": ["" if n % 10 == 3 else f"t {n}" for n in range(3000)]}),
        "large-rows": lambda: parquet(
            {"id": [1, 2, 3], "text": ["x" * 2_000_000, "y", "z" * 3_000_000], "k": [1, 2, 3]}
        ),
        "zstd": lambda: parquet(many, compression="zstd"),
        "version-1": lambda: parquet(many, version="1.0", use_dictionary=False),
        "pages-2": lambda: parquet(many, data_page_version="2.0"),
        "int96": lambda: parquet(
            few | {"k": pa.array([0, 1, 2], pa.timestamp("ns"))}, use_deprecated_int96_timestamps=True
        ),
    }
    keep = {"odd-names": ("", "a.b", "ä\n", "k"), "name-taken": ("embedding", "k")}
    return {
        f"parquet/file/{name}": Entry(lambda made=made: {"in.parquet": made()}, keep=keep.get(name, ("k",)))
        for name, made in files.items()
    }


def _table(named: Sequence[tuple[str, Any]]) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    buffer = io.BytesIO()
    pq.write_table(pa.Table.from_arrays([pa.array(values) for _, values in named], [name for name, _ in named]), buffer)
    return buffer.getvalue()


def _zero_row_groups(columns: Mapping[str, Any]) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    buffer, table = io.BytesIO(), pa.table(dict(columns))
    with pq.ParquetWriter(buffer, table.schema) as writer:
        for part in (table[:0], table[:2], table[:0], table[2:], table[:0]):
            writer.write_table(part)
    return buffer.getvalue()


def parquet_fuzzed(count: int = 40) -> dict[str, Entry]:
    """Tables of random columns, lengths and groups."""
    found: dict[str, Entry] = {}
    for seed in range(count):

        def content(seed: int = seed) -> Files:
            import pyarrow as pa

            dice = random.Random(2000 + seed)
            rows = dice.choice((3, 30, 900))
            kinds = [values for name, values in columns().items() if name != "string-view"]  # which has no `take`
            picks = pa.array([dice.randrange(4) for _ in range(rows)])
            text = pa.array([dice.choice(("a", "", None, "poison", "ä", "long " * 50)) for _ in range(rows)])
            table = {"id": dice.sample(range(10 * rows), rows), "text": text, "k": dice.choice(kinds).take(picks)}
            table |= {f"c{number}": dice.choice(kinds).take(picks) for number in range(dice.randrange(4))}
            return {"in.parquet": parquet(table, row_group_size=dice.choice((1, 7, 100, 1000)))}

        found[f"parquet/fuzzed/{seed}"] = Entry(content)
    return found


def arrow_files() -> dict[str, Entry]:
    """Arrow files and streams: every type kept, and odd files."""
    import pyarrow as pa

    found: dict[str, Entry] = {}
    more = columns() | {
        "dictionary-nulls-in": pa.DictionaryArray.from_arrays(
            pa.array([0, 1, None, 0], pa.int8()), pa.array(["a", None])
        ),
        "struct-empty": pa.array([{}, {}, None, {}], pa.struct([])),
        "run-end": pa.RunEndEncodedArray.from_arrays([1, 4], ["x", "y"]),
        "union": pa.UnionArray.from_dense(
            pa.array([0] * 4, pa.int8()), pa.array(range(4), pa.int32()), [pa.array(list("abcd"))]
        ),
        "uuid": pa.ExtensionArray.from_storage(
            pa.uuid(), pa.array([b"x" * 16, None, b"y" * 16, b"z" * 16], pa.binary(16))
        ),
        "list-view": pa.array([[1], None, [], [2, 3]], pa.list_view(pa.int64())),
        "interval": pa.array([(1, 2, 3), None, (0, 0, 0), (1, 0, 0)], pa.month_day_nano_interval()),
    }
    usual = {"id": [1, 2, 3, 4], "text": ["a", "bb", "ccc", "d e"], "k": [1, 2, 3, 4]}
    for name, values in more.items():
        found[f"arrow/kept/{name}"] = Entry(lambda values=values: {"in.arrow": arrow(usual | {"k": values})})
    many = {name: list(values) * 500 for name, values in usual.items()} | {"id": list(range(2000))}
    files = {
        "stream": lambda: arrow(usual, stream=True),
        "many": lambda: arrow(many, rows=300),
        "cut": lambda: arrow(usual)[:-30],
        "stream-cut": lambda: arrow(many, stream=True, rows=300)[:-400],
        "no-rows": lambda: arrow({name: pa.array(values[:0], pa.array(values).type) for name, values in usual.items()}),
        "magic-alone": lambda: b"ARROW1\0\0",
        "doubled-ids": lambda: arrow(usual | {"id": [1, 2, 1, 4]}),
    }
    return found | {f"arrow/file/{name}": Entry(lambda made=made: {"in.arrow": made()}) for name, made in files.items()}
