"""`python -m octavo.server` is `octavo`."""

import sys

from octavo.server.cli import main

sys.exit(main())
