"""SQL databases, as inputs and outputs."""
