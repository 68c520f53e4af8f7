"""The report of a job as one HTML page.

- `render.write_page`: writes it
"""
