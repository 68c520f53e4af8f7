"""The report of a run.

- `run_figures.Report`: a job's results and timings
- `report.ReportBuilder`: the listener that makes one
"""
