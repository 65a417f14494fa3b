"""Everything that is SQL, on a real PostgreSQL: one server for the run, one database for each test class."""
