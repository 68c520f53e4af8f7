"""The tests of tests/kernels/test_kernels.py, on the device."""

from tests.kernels.test_kernels import *  # noqa: F403
