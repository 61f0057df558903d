"""``python -m loraproxy``."""

import sys

from loraproxy.cli import main

sys.exit(main())
