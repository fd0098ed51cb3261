"""`python -m tests.cluster.serve_on_cluster HOST PORT KEY_FILE NODE...`: an API server on a cluster, one stage a node."""

from __future__ import annotations

import sys
from pathlib import Path

from shardwise.deploy import RunOptions
from shardwise.deploy.on_cluster import launch_on_cluster
from shardwise.server.access import read_keys
from shardwise.server.run import serve_forever
from shardwise.server.settings import ServerSettings


def main() -> None:
    host, port, keys, *nodes = sys.argv[1:]
    options = RunOptions(num_stages=len(nodes), context_tokens=512)
    serve_forever(
        lambda say: launch_on_cluster("sample", options, nodes=nodes, on_progress=say),
        ServerSettings(host=host, port=int(port)),
        keys=read_keys(Path(keys)),
    )


if __name__ == "__main__":
    main()
