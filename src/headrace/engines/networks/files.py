"""Load what a model's folder holds beside its weights, one load of the process at a time."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from json import JSONDecodeError
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError
from transformers import AutoConfig, AutoTokenizer
from transformers.utils import logging as transformers_logging

from headrace.engines.model_folder import check_tokenizer
from headrace.errors import EngineError, first_line

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

_turn = threading.Lock()
"""transformers changes settings of the whole process while it loads a model: two loads at once disturb each other."""
TURN_TIMEOUT_S = 300.0
"""Seconds that a load waits for the one before it."""
_holder: tuple[Path, float] | None = None
"""The model that is being loaded, and since when."""


def load_config(folder: Path, *, trust_remote_code: bool = False) -> PretrainedConfig:
    """A model's config.json. Raises EngineError: it cannot be loaded."""
    with reading(folder):
        return AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=trust_remote_code)


def load_tokenizer(
    folder: Path, source: str | Path | None = None, *, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """A model's fast tokenizer; `source` names another place to load it from.

    Raises:
        ConfigError: the folder holds none.
        EngineError: it cannot be loaded, or is not a fast one.
    """
    if source is None:
        check_tokenizer(folder)
    with reading(folder):
        tokenizer = AutoTokenizer.from_pretrained(
            str(source or folder), local_files_only=True, trust_remote_code=trust_remote_code
        )
    check_fast(folder, tokenizer)
    return tokenizer


def check_fast(folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Check that a tokenizer is one of the library tokenizers. Raises EngineError: it is not."""
    if not getattr(tokenizer, "is_fast", False):
        raise EngineError(f"the model in {folder} has no fast tokenizer (tokenizer.json)")


@contextmanager
def reading(folder: Path) -> Iterator[None]:
    """Wait for other loads, suppress transformers' output, and convert failures to one-line errors.

    Raises:
        EngineError: the files cannot be loaded; or another load hangs.
    """
    with _in_turn(folder), one_line_errors(folder), _quietly():
        yield


@contextmanager
def one_line_errors(folder: Path) -> Iterator[None]:
    """Name the model that cannot be loaded. Raises EngineError: the body failed at its files."""
    try:
        yield
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError) as error:
        if isinstance(error, EngineError):
            raise
        is_damaged = any(isinstance(one, SafetensorError | JSONDecodeError) for one in (error, error.__context__))
        words = first_line(error)
        if is_damaged:
            words = f"{words.rstrip('.')}; a file is damaged: copy or download the folder again"
        raise EngineError(f"the model in {folder} cannot be loaded: {words}") from error


@contextmanager
def _in_turn(folder: Path) -> Iterator[None]:
    global _holder  # noqa: PLW0603 - of the one lock of the process
    if not _turn.acquire(timeout=TURN_TIMEOUT_S):
        other, since = _holder or (folder, time.monotonic())
        raise EngineError(
            f"the model in {folder} cannot be loaded while the model in {other} is being loaded, which has taken "
            f"{time.monotonic() - since:.0f} s so far; if that one hangs, restart, and load it in a process of its own "
            "(``engine_process``)"
        )
    try:
        _holder = folder, time.monotonic()
        yield
    finally:
        _turn.release()


@contextmanager
def _quietly() -> Iterator[None]:
    bar, verbosity = transformers_logging.is_progress_bar_enabled(), transformers_logging.get_verbosity()
    # Its progress bar would interfere with the job's, and the caller reports missing weights.
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bar:
            transformers_logging.enable_progress_bar()
