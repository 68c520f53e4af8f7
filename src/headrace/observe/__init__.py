"""Event listeners.

- `results.Report`: a job's results and timings
- `progress.Progress`: a progress bar
- `prometheus.PrometheusListener`: counters and histograms
"""
