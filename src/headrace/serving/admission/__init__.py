"""Admission of requests and bulk work.

- `controller.AdmissionController`: accepts the requests that can be answered in time
- `backfill.Backfill`: runs bulk work in the gaps between requests
"""
