"""Bulk jobs.

- `run.run`: the main path
- `settings.JobSettings`: what a user says about a job
"""
