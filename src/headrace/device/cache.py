"""Cached tuning results for models on this machine: one small JSON file each."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import tempfile
from collections.abc import Mapping
from pathlib import Path

logger = logging.getLogger("headrace")

_FORMAT = 1
_LIMITS_OF_ISA = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS")
"""Environment variables that keep the libraries from instructions which the CPU has."""
_FLAGS = ("avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_fp16", "amx_int8", "sve", "bf16", "i8mm")
"""Flags of /proc/cpuinfo that decide how fast matrix products are, and in which dtypes."""


def cache_folder() -> Path:
    """The folder of the files, by the XDG Base Directory Specification."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if Path(base).is_absolute() else Path.home() / ".cache") / "headrace" / "tuning"


def cpu_facts(cpuinfo: Path = Path("/proc/cpuinfo")) -> dict[str, str | list[str]]:
    """The CPU and the instructions that it has and may use."""
    model, flags = platform.processor() or platform.machine(), set()
    try:
        lines = [line.partition(":") for line in cpuinfo.read_text().splitlines()]
    except OSError:
        lines = []
    for name, _, value in lines:
        if name.strip() == "model name":
            model = value.strip()
        elif name.strip() in ("flags", "Features"):
            flags = set(value.split())
    return {
        "cpu": model,
        "instructions": [flag for flag in _FLAGS if flag in flags],
        **{name: os.environ[name] for name in _LIMITS_OF_ISA if name in os.environ},
    }


def described_cpu() -> str:
    """The CPU and its instructions, for people."""
    facts = cpu_facts()
    return ", ".join([str(facts["cpu"]), *facts["instructions"]])


class TuningCache:
    """Results by model, device, versions and threads. Files that cannot be read or written are ignored.

    Args:
        folder: where the files are; None for the user's cache.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder

    def read(self, key: Mapping[str, object]) -> dict[str, object] | None:
        """The result for this key; None if there is none, or if the file is damaged or of another version."""
        path = self._path(key)
        if path is None:
            return None
        try:
            kept = json.loads(path.read_text(encoding="utf-8"))
            if kept["format"] != _FORMAT:
                logger.warning("%s is of another version of Headrace and is ignored", path)
                return None
            if kept["key"] != _plain(key):
                raise ValueError("it belongs to another key")
            return dict(kept["found"])
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            logger.warning("%s is damaged and is ignored: %s", path, error)
            return None

    def write(self, key: Mapping[str, object], found: Mapping[str, object]) -> None:
        """Store a result. A process that reads meanwhile finds the whole old file or the whole new one."""
        path = self._path(key)
        if path is None:
            return
        content = json.dumps({"format": _FORMAT, "key": _plain(key), "found": found}, indent=1)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=path.parent, suffix=".tmp") as folder:
                (Path(folder) / path.name).write_text(content, encoding="utf-8")
                (Path(folder) / path.name).replace(path)
        except OSError as error:
            logger.info("the tuning result cannot be stored: %s", error)

    def _path(self, key: Mapping[str, object]) -> Path | None:
        try:
            folder = self._folder or cache_folder()
        except RuntimeError:  # there is no home
            return None
        name = hashlib.blake2b(json.dumps(_plain(key), sort_keys=True).encode(), digest_size=12).hexdigest()
        return folder / f"{name}.json"


def _plain(key: Mapping[str, object]) -> object:
    """The key after a round trip through JSON."""
    return json.loads(json.dumps(dict(key), sort_keys=True))
