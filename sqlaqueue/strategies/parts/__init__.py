"""What strategies are built from: tokens, columns, indexes, dead letters, job listings, privileges."""
