"""The life of one stage worker, from its configuration to its exit status; see `stage.__main__`."""

from __future__ import annotations

import os
import sys
import threading

import zmq

from shardwise.errors import AuthenticationFailed, ShardwiseError
from shardwise.stage.config import WorkerConfig, read_config
from shardwise.stage.worker import StageWorker
from shardwise.transport.channel import Outbox
from shardwise.transport.messages import failure_of
from shardwise.transport.promptness import prompt_context
from shardwise.transport.security.keys import NodeKeys


def _watch_parent() -> None:
    """End this process as soon as the parent's end of the pipe closes."""

    def wait() -> None:
        while os.read(sys.stdin.fileno(), 65536):
            continue
        os._exit(0)

    threading.Thread(target=wait, name="parent-watch", daemon=True).start()


def _report(config: WorkerConfig, context: zmq.Context[zmq.Socket[bytes]], error: ShardwiseError) -> None:
    keys = NodeKeys(config.public_key, config.secret_key) if config.public_key else None
    outbox = Outbox(context, config.driver_address, config.hello, keys, config.driver_key)
    outbox.send(failure_of(error, stage=config.stage))
    outbox.close(linger_ms=2000)


def serve() -> int:
    """Run one worker; the exit status is 0 after a clean end."""
    try:
        config = read_config()
    except ShardwiseError as error:
        print(f"error: {error.one_line()}", file=sys.stderr)
        return 2
    _watch_parent()
    context = prompt_context()
    try:
        StageWorker(config, context).run()
    except ShardwiseError as error:
        print(f"error: {error.one_line()}", file=sys.stderr)
        if not isinstance(error, AuthenticationFailed):  # the driver would not listen
            _report(config, context, error)
        context.term()
        return error.exit_code
    context.term()
    return 0
