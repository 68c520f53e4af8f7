"""File formats: what reads each, what writes it, and its declaration as a `known.Format`."""
