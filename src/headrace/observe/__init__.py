"""Listeners to events.

- `report.Report`: where the time of a job went
- `progress.Progress`: a progress bar
- `prometheus.PrometheusListener`: counters and histograms
"""
