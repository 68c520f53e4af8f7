"""Where records come from and where results go.

- `base.Source`: the seam at the beginning of a job
- `base.PartWriter`: the seam at its end
"""
