"""The process that stands for this machine in a cluster: `python -m shardwise.cluster.daemon [STATE FOLDER]`.

It is the coordinator (keeps the book, runs Ray's head) or a node (beats, runs a raylet), as the cluster file says.
**Promises** writes `daemon.json` once it answers and again when it is ready; ends on SIGTERM, `StopRequest`, or when
the cluster goes down; Ray ends with it. **Fails when** a port is taken or Ray does not start: said in `daemon.json`
and its log. **Called by** `lifecycle`, systemd, launchd.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from pathlib import Path

from shardwise.cluster.coordinator_daemon import CoordinatorDaemon
from shardwise.cluster.node_daemon import NodeDaemon
from shardwise.cluster.state import COORDINATOR, DaemonFile, StateDir
from shardwise.errors import ShardwiseError
from shardwise.transport.security import NodeKeys


def main() -> int:
    """Run until told to end; the exit status is 0 after a clean end."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    state = StateDir(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    try:
        cluster = state.load_cluster()
        daemon = (CoordinatorDaemon if cluster.role == COORDINATOR else NodeDaemon)(state, stop)
        daemon.run()
    except ShardwiseError as error:
        print(f"error: {error.one_line()}", file=sys.stderr)
        public = NodeKeys.load_or_make(state.node_key).public
        state.save_daemon(DaemonFile(pid=os.getpid(), control_address="", public=public, trouble=error.one_line()))
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
