"""`python -m shmlimit COMMAND`."""

from __future__ import annotations

import sys

from shmlimit.cli import main

if __name__ == "__main__":
    sys.exit(main())
