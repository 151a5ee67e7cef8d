"""`python -m riskfield`: the command-line program."""

import sys

from riskfield.cli import main

if __name__ == "__main__":
    sys.exit(main())
