"""What the pages show, read from the database: functions of a Session that return dataclasses."""
