"""Options: reading, precedence, refusals, the generated page."""
