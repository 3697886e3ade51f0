"""Everything that only PostgreSQL has: scans of the claim order, triggers, side tables, checks, and pg_catalog."""
