"""`python -m papers`: the studies as commands."""

import sys

from papers.commands import main

if __name__ == "__main__":
    sys.exit(main())
