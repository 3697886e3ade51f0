"""What strategies are built from: tokens, indexes, message tables, dead letters, job listings, privileges."""
