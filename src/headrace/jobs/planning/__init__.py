"""What can be said of a job from a sample of it.

- `survey.survey`: what the input is like
- `forecast.forecast`: how long the job will take and what it needs
"""
