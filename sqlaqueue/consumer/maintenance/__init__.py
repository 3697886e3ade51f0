"""What a Consumer does for its queue beside running jobs."""
