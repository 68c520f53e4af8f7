"""The report of a run.

- `run_figures.Report`: a job's results and timings
- `report.ReportBuilder`: the listener that makes one
- `job_figures.JobFigures`: the figures of a job over all its runs
"""
