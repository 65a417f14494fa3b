"""PostgreSQL mechanics without PostgreSQL: text, decisions, and the pool over fake connections."""
