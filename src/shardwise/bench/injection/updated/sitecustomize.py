"""A worker that comes back updated: from its second start on it speaks another protocol version.

Put on a worker's PYTHONPATH by the fault `version_mismatch` only. The file named by SHARDWISE_STARTS remembers the first start.
"""

from __future__ import annotations

import os
from pathlib import Path

from shardwise.transport import messages

_starts = Path(os.environ["SHARDWISE_STARTS"])
if _starts.exists():
    messages.PROTOCOL_VERSION += 1
else:
    _starts.write_text("1", encoding="utf-8")
