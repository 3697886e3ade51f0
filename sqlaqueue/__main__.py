"""``python -m sqlaqueue`` runs the command ``sqlaqueue``."""

from sqlaqueue.cli import main

if __name__ == "__main__":
    main(prog_name="sqlaqueue")
