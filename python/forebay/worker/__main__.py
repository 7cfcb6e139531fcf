"""`python -m forebay.worker`: runs one hand."""

import sys

from forebay.worker.loop import main

if __name__ == "__main__":
    sys.exit(main())
