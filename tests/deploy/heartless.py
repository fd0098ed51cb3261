"""A stage worker without a heartbeat, to measure what one costs: `python -m tests.deploy.heartless`."""

from __future__ import annotations

import sys

from shardwise.stage import heart
from shardwise.stage.__main__ import main

if __name__ == "__main__":
    heart.INTERVAL_S = 1e6
    sys.exit(main())
