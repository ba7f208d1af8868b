"""`python -m headrace.cli`: the same as `headrace`, where the script is not on the path."""

import sys

from headrace.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
