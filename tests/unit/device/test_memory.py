"""How much memory there is, and the budget that fills it."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.device.memory import (
    TARGET_SHARE,
    AvailableMemory,
    BatchPeak,
    MemoryModel,
    MemoryWatch,
    PeakMeter,
    fit,
    memory_limit,
)

POINTS = [(256, 16), (1_024, 16), (1_024, 128), (2_048, 256)]


@given(st.floats(1e7, 1e9), st.floats(1e2, 1e6), st.floats(0, 1e4))
def test_the_fit_finds_what_made_the_peaks(fixed: float, per_token: float, per_pair: float) -> None:
    device = MemoryModel(fixed, per_token, per_pair)
    found = fit([BatchPeak(tokens, length, device.peak(tokens, length)) for tokens, length in POINTS])
    assert found.peak(4_096, 200) == pytest.approx(device.peak(4_096, 200), rel=1e-3)


def test_a_fit_of_one_point_or_of_noise_takes_nothing_away() -> None:
    assert fit([BatchPeak(100, 10, 5e6)]).peak(100, 10) == pytest.approx(5e6, rel=1e-3)
    falling = fit([BatchPeak(100, 10, 5e6), BatchPeak(1_000, 10, 4e6), BatchPeak(1_000, 100, 4e6)])
    assert falling.per_token >= 0 and falling.per_pair >= 0
    with pytest.raises(ValueError, match="no peak"):
        fit([])


@pytest.mark.parametrize("seed", range(5))
def test_ten_thousand_mixed_batches_fill_four_fifths_and_never_fail(seed: int) -> None:
    """A simulated device: the probe's peaks are off by up to 2 %."""
    chance = random.Random(seed)
    limit = 8e9
    device = MemoryModel(chance.uniform(0.5e9, 2e9), chance.uniform(2e4, 2e5), chance.uniform(0, 400))
    measured = [BatchPeak(t, n, device.peak(t, n) * chance.uniform(0.99, 1.01)) for t, n in [*POINTS, (8_192, 256)]]
    longest = 256
    budget = fit(measured).largest_budget(TARGET_SHARE * limit, longest)
    shares = []
    for _ in range(10_000):
        length = chance.choice((8, 32, 100, 256))
        records = int(budget // length)
        shares.append(device.peak(records * length, length) / limit)
    assert max(shares) <= 1, "a batch does not fit"
    assert 0.75 <= max(shares) <= 0.85


def test_the_limit_is_the_least_of_the_machine_and_all_groups_above(tmp_path: Path) -> None:
    own = tmp_path / "cgroup"
    own.write_text("0::/pod/app\n")
    machine = memory_limit(tmp_path, own)
    assert machine.source == "the machine" and machine.bytes > 1 << 26
    (tmp_path / "pod" / "app").mkdir(parents=True)
    (tmp_path / "pod" / "app" / "memory.max").write_text("max\n")
    assert memory_limit(tmp_path, own) == machine
    (tmp_path / "pod" / "memory.max").write_text("50000000\n")
    assert memory_limit(tmp_path, own).bytes == 50_000_000
    assert "pod" in memory_limit(tmp_path, own).source


def test_the_limit_of_a_group_of_version_1(tmp_path: Path) -> None:
    own = tmp_path / "cgroup"
    own.write_text("5:cpu:/a\n4:memory:/a\n")
    (tmp_path / "memory" / "a").mkdir(parents=True)
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text(str((1 << 63) - 4096))
    (tmp_path / "memory" / "a" / "memory.limit_in_bytes").write_text("60000000")
    assert memory_limit(tmp_path, own).bytes == 60_000_000


def test_what_the_process_holds_is_measured_where_the_system_says(tmp_path: Path) -> None:
    (tmp_path / "status").write_text("VmHWM:\t  300 kB\nVmRSS:\t  200 kB\n")
    meter = PeakMeter(tmp_path)
    assert meter.restart()
    assert meter.peak() == 300 * 1024
    assert not PeakMeter(tmp_path / "none").restart()
    assert PeakMeter(tmp_path / "none").peak() is None


class TwoCounts(PeakMeter):
    """A device that keeps more than its tensors take, in pieces of 512 MB."""

    def __init__(self, gaps: float) -> None:
        self.allocated, self.gaps = 1e9, gaps

    def restart(self) -> bool:
        return True

    def peaks(self) -> tuple[int, ...]:
        return int(self.allocated), -int(-self.allocated * self.gaps // 512e6) * int(512e6)


@pytest.mark.parametrize("gaps", [1.0, 1.6])
def test_memory_is_fitted_on_what_tensors_take_and_on_what_is_kept(gaps: float) -> None:
    meter = TwoCounts(gaps)
    watch = MemoryWatch(AvailableMemory(int(80e9), "a test"), meter)
    for tokens in (8_192, 9_000, 16_384, 16_384, 32_768):
        meter.allocated = max(meter.allocated, 1e9 + 2e5 * tokens)
        watch.ran(tokens // 64, tokens)
    assert watch.bound is not None and watch.highest == meter.peaks()[1]
    full = 1e9 + 2e5 * watch.bound
    assert 0.7 * 80e9 <= gaps * full <= 0.85 * 80e9
