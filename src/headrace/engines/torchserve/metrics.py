"""TorchServe's metrics API for handlers. Values are kept in memory only."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field


class MetricTypes(enum.Enum):
    """The type of a metric."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass
class Dimension:
    """A name and value that distinguish metrics."""

    name: str
    value: object

    def __str__(self) -> str:
        return f"{self.name}:{self.value}"

    def to_dict(self) -> dict[str, object]:
        return {"Name": self.name, "Value": self.value}


@dataclass
class Metric:
    """One metric: a counter sums its values, any other keeps the last."""

    name: str
    value: float = 0
    unit: str | None = None
    dimensions: Sequence[object] = ()
    request_id: str | None = None
    metric_method: str | None = None
    metric_type: MetricTypes = MetricTypes.GAUGE

    @property
    def metric_name(self) -> str:
        """Alias of `name` in TorchServe."""
        return self.name

    def add_or_update(
        self,
        value: float,
        dimension_values: Sequence[object] = (),  # noqa: ARG002 - the documented shape
        request_id: str = "",  # noqa: ARG002 - likewise
    ) -> None:
        """Add to a counter, or set any other metric."""
        self.value = self.value + value if self.metric_type is MetricTypes.COUNTER else value

    def update(self, value: float) -> None:
        """Add to a counter, or set any other metric."""
        self.add_or_update(value)

    def reset(self) -> None:
        self.value = 0


@dataclass
class Metrics:
    """`context.metrics`: metrics by type and name, created on first use."""

    request_ids: dict[int, str] = field(default_factory=dict)
    model_name: str = ""
    cache: dict[MetricTypes, dict[str, Metric]] = field(default_factory=dict)

    def get_metric(self, metric_name: str, metric_type: MetricTypes = MetricTypes.COUNTER) -> Metric:
        """The metric with this name and type."""
        return self.add_metric_to_cache(metric_name, metric_type=metric_type)

    def add_metric_to_cache(
        self,
        metric_name: str,
        unit: str | None = None,
        dimension_names: Sequence[str] = (),
        metric_type: MetricTypes = MetricTypes.COUNTER,
    ) -> Metric:
        """The metric with this name and type; a new one has this unit and these dimensions."""
        new = Metric(metric_name, unit=unit, dimensions=dimension_names, metric_type=metric_type)
        return self.cache.setdefault(metric_type, {}).setdefault(metric_name, new)

    def add_metric(
        self,
        name: str,
        value: float,
        *described: object,  # noqa: ARG002 - TorchServe's signature
        metric_type: MetricTypes = MetricTypes.COUNTER,
        **more: object,  # noqa: ARG002 - likewise
    ) -> Metric:
        """Add to a counter, or set another type of metric. Unit, row and dimensions are ignored."""
        metric = self.add_metric_to_cache(name, metric_type=metric_type)
        metric.add_or_update(value)
        return metric

    def add_counter(
        self,
        name: str,
        value: float,
        *described: object,
        metric_type: MetricTypes = MetricTypes.COUNTER,
        **more: object,
    ) -> Metric:
        return self.add_metric(name, value, *described, metric_type=metric_type, **more)

    def add_time(
        self,
        name: str,
        value: float,
        *described: object,
        metric_type: MetricTypes = MetricTypes.GAUGE,
        **more: object,
    ) -> Metric:
        return self.add_metric(name, value, *described, metric_type=metric_type, **more)

    add_error = add_counter
    add_size = add_percent = add_time
