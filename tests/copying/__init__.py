"""Enqueueing by COPY."""
