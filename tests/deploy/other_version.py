"""A stage worker of a release that speaks another protocol: `python -m tests.deploy.other_version`."""

from __future__ import annotations

import sys

from shardwise.transport import messages

messages.PROTOCOL_VERSION += 1  # before anything else of the program takes the number

from shardwise.stage.__main__ import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
