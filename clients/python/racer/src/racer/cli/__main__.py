"""`python -m racer.cli`."""

import sys

from racer.cli import main

sys.exit(main())
