"""Power and clocks of a GPU, by a double of pynvml."""

from __future__ import annotations

from headrace.device.nvml import GpuReading, open_gpu


class FakeNvml:  # the names are NVIDIA's
    """One GPU that has used 5 kJ."""

    NVML_CLOCK_SM = 1

    class NVMLError(Exception):
        """What NVML raises."""

    def __init__(self, *, driver: bool = True, tells: bool = True) -> None:
        self._driver, self._tells = driver, tells

    def nvmlInit(self) -> None:  # noqa: N802
        if not self._driver:
            raise self.NVMLError

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
        assert uuid == "GPU-1234"
        return "handle"

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:  # noqa: N802
        if not self._tells:
            raise self.NVMLError
        return 5_000_000

    def nvmlDeviceGetClockInfo(self, handle: str, clock: int) -> int:  # noqa: N802
        return 1_980


def test_a_gpu_is_read() -> None:
    gpu = open_gpu("1234", FakeNvml())
    assert gpu is not None
    assert gpu.read() == GpuReading(5_000.0, 1_980.0)


def test_without_a_driver_or_a_counter_nothing_is_told() -> None:
    assert open_gpu("1234", FakeNvml(driver=False)) is None
    older = open_gpu("GPU-1234", FakeNvml(tells=False))
    assert older is not None
    assert older.read() is None
