"""The tests of tests/contract/engines/test_engine.py, on the device."""

from tests.contract.engines.test_engine import *  # noqa: F403
