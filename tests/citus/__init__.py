"""Tests on Citus: a coordinator and two workers, started from a build of it, or a cluster that a URL names."""
