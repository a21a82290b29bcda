"""`python -m racer_vllm`: the command `racer-vllm`."""

import sys

from racer_vllm.cli import main

sys.exit(main())
