"""Power, clocks and counters of a GPU, by a double of pynvml."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from headrace.device.nvml import GpuActivity, GpuReading, open_gpu


class FakeNvml:  # the names are NVIDIA's
    """One GPU that has used 5 kJ."""

    NVML_CLOCK_SM = 1

    class NVMLError(Exception):
        """What NVML raises."""

    NVML_GPM_METRICS_GET_VERSION = 1

    def __init__(self, *, driver: bool = True, tells: bool = True, fails_at: str = "") -> None:
        self._driver, self._tells, self._fails_at = driver, tells, fails_at
        self.samples: list[int] = []
        """Those that are not freed."""
        self._made = 0

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

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: str) -> int:  # noqa: N802
        return 700_000

    def nvmlGpmQueryDeviceSupport(self, handle: str) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(isSupportedDevice=int(self._fails_at != "support"))

    def nvmlGpmSampleAlloc(self) -> int:  # noqa: N802
        self._made += 1
        self.samples.append(self._made)
        return self._made

    def nvmlGpmSampleGet(self, handle: str, sample: int) -> int:  # noqa: N802
        if self._fails_at == "sample":
            raise self.NVMLError
        return sample

    def nvmlGpmSampleFree(self, sample: int) -> None:  # noqa: N802
        self.samples.remove(sample)

    def c_nvmlGpmMetricsGet_t(self) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(metrics=[SimpleNamespace(value=0.0) for _ in range(9)])

    def nvmlGpmMetricsGet(self, asked: SimpleNamespace) -> None:  # noqa: N802
        if self._fails_at == "metrics":
            raise self.NVMLError
        assert (asked.version, asked.sample1, asked.sample2) == (1, 1, 2)
        for metric in asked.metrics[: asked.numMetrics]:
            metric.value = {1: 97.0, 5: 41.0, 10: 23.0}[metric.metricId]


def test_a_gpu_is_read() -> None:
    gpu = open_gpu("1234", FakeNvml())
    assert gpu is not None
    assert gpu.read() == GpuReading(5_000.0, 1_980.0, 700.0, counters=1)


@pytest.mark.parametrize("fails_at", ["", "support", "sample", "metrics"])
def test_what_a_gpu_did_comes_from_its_counters(fails_at: str) -> None:
    library = FakeNvml(fails_at=fails_at)
    gpu = open_gpu("1234", library)
    first, last = gpu.read(), gpu.read()
    assert first is not None and last is not None
    assert gpu.activity(first, last) == (None if fails_at else GpuActivity(0.97, 0.41, 0.23))
    assert not library.samples


def test_without_a_driver_or_a_counter_nothing_is_told() -> None:
    assert open_gpu("1234", FakeNvml(driver=False)) is None
    older = open_gpu("GPU-1234", FakeNvml(tells=False))
    assert older is not None
    assert older.read() is None
