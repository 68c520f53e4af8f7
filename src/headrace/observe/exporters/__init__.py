"""Events in the formats of other tools.

- `prometheus.PrometheusListener`: counters and histograms
- `trace.TraceWriter`: a trace for Perfetto
- `tracking.TrackingListener`: the base of listeners for experiment trackers
"""
