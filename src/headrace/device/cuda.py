"""How many CUDA devices there are, without the time to import PyTorch until it is asked."""

from __future__ import annotations

import importlib.util


def cuda_devices() -> int:
    """The CUDA devices that PyTorch sees; 0 without PyTorch."""
    if importlib.util.find_spec("torch") is None:
        return 0
    import torch

    return int(torch.cuda.device_count())
