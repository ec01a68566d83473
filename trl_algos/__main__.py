"""`python -m trl_algos`: the same as the `trl-algos` command."""

import sys

from trl_algos.cli import main

if __name__ == "__main__":
    sys.exit(main())
