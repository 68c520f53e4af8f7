"""Admission of requests and bulk work.

- `controller.AdmissionController`: limits the records and cost in progress
- `backfill.Backfill`: runs bulk work in the gaps between requests
"""
