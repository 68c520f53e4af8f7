"""Jobs from settings.

- `job.execute`: build a job from `JobSettings` and run it
- `steps.run_steps`: run a job of several steps
- `plan.check`: what can be known of a job before a model is loaded
"""
