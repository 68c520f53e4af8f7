"""What a job or server does now.

- `progress.Progress`: a progress bar
- `frame.Frame`: the state of one moment
"""
