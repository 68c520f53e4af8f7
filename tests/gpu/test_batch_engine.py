"""The tests of tests/contract/engines/test_batch_engine.py, on the device."""

from tests.contract.engines.test_batch_engine import *  # noqa: F403
