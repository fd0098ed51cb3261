"""`python -m shardwise.stage`: one stage worker, configured on standard input, logging to standard error.

It ends when it is told to (`Shutdown`), when the driver refuses it (exit status 4), when its standard input closes (the
parent is gone, however it died), or when it cannot load, which the driver hears as `Failure`. A native crash leaves a
traceback of all threads in the log.
"""

from __future__ import annotations

import faulthandler
import os
import signal
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


def main() -> int:
    """Run one worker; the exit status is 0 after a clean end."""
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the driver's to handle
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


if __name__ == "__main__":
    sys.exit(main())
