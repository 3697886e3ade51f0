"""Which jobs to claim, how many, and from where."""
