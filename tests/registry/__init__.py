"""The registry's decisions, as values."""
