"""`python -m pyramidsd`."""

import sys

from pyramidsd.cli import main

sys.exit(main())
