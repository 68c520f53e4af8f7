"""What TorchServe handlers measure with; the figures are kept in memory and go nowhere else."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field


class MetricTypes(enum.Enum):
    """What a figure means."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass
class Dimension:
    """A name and a value by which figures are told apart."""

    name: str
    value: object

    def __str__(self) -> str:
        return f"{self.name}:{self.value}"

    def to_dict(self) -> dict[str, object]:
        """As TorchServe writes it."""
        return {"Name": self.name, "Value": self.value}


@dataclass
class Metric:
    """One figure: a counter adds up, any other has its last value."""

    name: str
    value: float = 0
    unit: str | None = None
    dimensions: Sequence[object] = ()
    request_id: str | None = None
    metric_method: str | None = None
    metric_type: MetricTypes = MetricTypes.GAUGE

    @property
    def metric_name(self) -> str:
        """Its other name in TorchServe."""
        return self.name

    def add_or_update(
        self,
        value: float,
        dimension_values: Sequence[object] = (),  # noqa: ARG002 - the documented shape
        request_id: str = "",  # noqa: ARG002 - likewise
    ) -> None:
        """Count or set."""
        self.value = self.value + value if self.metric_type is MetricTypes.COUNTER else value

    def update(self, value: float) -> None:
        """Likewise."""
        self.add_or_update(value)

    def reset(self) -> None:
        """Begin again at 0."""
        self.value = 0


@dataclass
class Metrics:
    """`context.metrics`: figures by kind and name, made when they are first asked for."""

    request_ids: dict[int, str] = field(default_factory=dict)
    model_name: str = ""
    cache: dict[MetricTypes, dict[str, Metric]] = field(default_factory=dict)

    def get_metric(self, metric_name: str, metric_type: MetricTypes = MetricTypes.COUNTER) -> Metric:
        """The figure of this name and kind."""
        return self.add_metric_to_cache(metric_name, metric_type=metric_type)

    def add_metric_to_cache(
        self,
        metric_name: str,
        unit: str | None = None,
        dimension_names: Sequence[str] = (),
        metric_type: MetricTypes = MetricTypes.COUNTER,
    ) -> Metric:
        """The same, with a unit and dimensions where it is new."""
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
        """Count, or set what is said to be no counter; unit, row and dimensions are not looked at."""
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
        """Count."""
        return self.add_metric(name, value, *described, metric_type=metric_type, **more)

    def add_time(
        self,
        name: str,
        value: float,
        *described: object,
        metric_type: MetricTypes = MetricTypes.GAUGE,
        **more: object,
    ) -> Metric:
        """Set a time."""
        return self.add_metric(name, value, *described, metric_type=metric_type, **more)

    add_error = add_counter
    add_size = add_percent = add_time
