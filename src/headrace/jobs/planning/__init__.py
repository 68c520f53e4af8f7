"""What can be said of a job from a sample of it.

- `columns.resolve`: which columns it reads
- `survey.survey`: what the input is like
- `forecast.forecast`: how long the job will take and what it needs
"""
