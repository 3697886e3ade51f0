"""Enqueue many jobs by COPY."""
