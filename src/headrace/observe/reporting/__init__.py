"""The report of a run.

- `results.Report`: a job's results and timings
- `report.ReportBuilder`: the listener that makes one
"""
