"""`python -m uma`: the command `uma`, for systems where the script is not on the path."""

import sys

from uma.cli import main

if __name__ == "__main__":
    sys.exit(main())
