"""The life of one stage worker, from its configuration to its exit status; see `stage.__main__`."""

from __future__ import annotations

import sys

import zmq

from shardwise.errors import AuthenticationFailed, ShardwiseError
from shardwise.parent_watch import end_with_input
from shardwise.stage.config import WorkerConfig, read_config
from shardwise.stage.worker import StageWorker
from shardwise.transport.channel import Outbox
from shardwise.transport.messages import failure_of
from shardwise.transport.promptness import prompt_context
from shardwise.transport.security.keys import NodeKeys


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
    end_with_input()
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
