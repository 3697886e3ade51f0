"""``python -m tests.benchmarks costs|plain [--write]``: compare the costs or the SQL with the files, or write them."""

import argparse
import sys

from tests.benchmarks import test_costs, test_plain_sql

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    parser.add_argument("what", choices=["costs", "plain"])
    parser.add_argument("--write", action="store_true", help="write the files")
    arguments = parser.parse_args()
    main = test_costs.main if arguments.what == "costs" else test_plain_sql.main
    sys.exit(main(write=arguments.write))
