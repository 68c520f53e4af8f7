"""Events in the formats of other tools.

- `prometheus.PrometheusListener`: counters and histograms
- `trace.TraceWriter`: a trace for Perfetto
"""
