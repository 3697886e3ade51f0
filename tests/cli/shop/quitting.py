"""A module that exits the process."""

raise SystemExit("configure me")
