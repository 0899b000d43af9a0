"""`python -m pipeplan`, the same as the `pipeplan` command."""

import sys

from pipeplan.cli import main

if __name__ == "__main__":
    sys.exit(main())
