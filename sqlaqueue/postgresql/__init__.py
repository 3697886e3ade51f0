"""Everything that only PostgreSQL has."""
