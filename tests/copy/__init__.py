"""Tests of bulk enqueueing by COPY."""
