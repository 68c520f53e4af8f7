"""`headrace merge`: merge the parts of an output into one file."""

from __future__ import annotations

from dataclasses import MISSING, dataclass
from typing import Annotated, ClassVar

import typer

from headrace.cli.flags import with_settings
from headrace.cli.outcome import say
from headrace.jobs.state.merging import merge as merge_parts
from headrace.options import option

EXAMPLES = """Examples:

headrace merge labels/ -o labels.jsonl

headrace merge vectors.parquet -o so-far.parquet
"""

Output = Annotated[str, typer.Argument(help="A folder of parts, or the output of a job that is not finished.")]


@dataclass(frozen=True, slots=True)
class FileFlags:
    """The file."""

    panel: ClassVar[str] = "Options"

    into: str = option(MISSING, "The file to write, in the format of the parts.", flags=("-o", "--output-file"))
    overwrite: bool = option(False, "Replace the file if it exists.")


@with_settings
def merge(output: Output, file: FileFlags) -> int:
    """Merge the parts of an output into one file, in input order, and their failed records into a file beside it.

    The parts are kept, and an unfinished job can continue.
    """
    merged = merge_parts(output, file.into, overwrite=file.overwrite)
    failed = f", {merged.failed:,} failed, see {merged.errors}" if merged.failed else ""
    gaps = "" if merged.whole else ", and records between these are missing"
    more = "" if merged.finished else f"; the job is not finished{gaps}"
    say(f"wrote {file.into}: {merged.records - merged.failed:,} of {merged.records:,} records{failed}{more}")
    return 0
