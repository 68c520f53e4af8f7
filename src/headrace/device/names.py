"""The names of devices and dtypes, which can be judged before PyTorch is imported."""

from __future__ import annotations

import re

from headrace.errors import ConfigError

DTYPES = ("float32", "float16", "bfloat16")
_DEVICE = re.compile(r"auto|(cpu|cuda)(:\d{1,3})?")


def check_device(device: str) -> None:
    """Raises ConfigError: it is not the name of a device."""
    if _DEVICE.fullmatch(device) is None:
        raise ConfigError(f"``device`` {device!r} is unknown; it may be auto, cpu, cuda or cuda:N")


def check_dtype(dtype: str) -> None:
    """Raises ConfigError: it is not the name of a dtype that models are loaded in."""
    if dtype not in ("auto", *DTYPES):
        raise ConfigError(f"``dtype`` {dtype!r} is unknown; it may be auto, {', '.join(DTYPES)}")
