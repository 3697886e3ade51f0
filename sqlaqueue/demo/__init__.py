"""The demo and the check of an installation: strategies run side by side on an empty database."""
