"""Wait for the end of a job."""
