"""``python -m sqlaqueue.cli`` is the command ``sqlaqueue``."""

from sqlaqueue.cli import main

main(prog_name="sqlaqueue")
