"""The process that speaks with Ray, so that the one that serves does not have to.

    python -m shardwise.cluster.ray_engine.broker        (frames on standard input and output; started by RayEngine)

Ray ends a driver process whose head is gone for good, installs signal handlers and a dozen threads; a server that
streams tokens wants none of that. Commands flow in, reports out. **Promises** ends with its standard input, and Ray
then ends the actors and these their workers. **Fails when** Ray cannot be reached (`Broken`, then exit 1).
"""

from __future__ import annotations

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import BinaryIO

from shardwise.cluster.child import die_with_parent
from shardwise.cluster.ray_engine.frames import (
    Answer,
    AnyFrame,
    Attach,
    Broken,
    FailureNote,
    StartWorker,
    StopWorker,
    read_frame,
    write_frame,
)
from shardwise.cluster.ray_engine.placement import Placement
from shardwise.cluster.ray_engine.ray_calls import RayCalls
from shardwise.errors import ProtocolMismatch, ShardwiseError, UsageError

_MAX_PARALLEL = 32


class Broker:
    """Reads commands until the input ends."""

    def __init__(self, source: BinaryIO, sink: BinaryIO) -> None:
        self._source = source
        self._sink = sink
        self._writing = threading.Lock()
        self._pool = ThreadPoolExecutor(max_workers=_MAX_PARALLEL, thread_name_prefix="command")

    def run(self) -> None:
        """Attach, then serve."""
        first = read_frame(self._source)
        if not isinstance(first, Attach):
            raise UsageError("the first frame must be Attach")
        placement = Placement(RayCalls(first.head, first.own_ip), self._send)
        placement.watch()
        while True:
            frame = read_frame(self._source)
            self._pool.submit(self._obey, placement, frame)

    def _obey(self, placement: Placement, frame: AnyFrame) -> None:
        if not isinstance(frame, StartWorker | StopWorker):
            raise ProtocolMismatch(f"a {type(frame).__name__} is not a command")
        failure = None
        try:
            if isinstance(frame, StartWorker):
                placement.start(frame.spec)
            else:
                placement.stop(frame.name, frame.grace_s)
        except ShardwiseError as error:
            failure = FailureNote.of(error)
        self._send(Answer(request=frame.request, failure=failure))

    def _send(self, frame: AnyFrame) -> None:
        with self._writing:
            try:
                write_frame(self._sink, frame)
            except OSError:
                os._exit(0)  # the engine is gone


def main() -> None:
    """Keep the pipes for frames: whatever Ray prints goes to the log."""
    die_with_parent()
    sink = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    broker = Broker(sys.stdin.buffer, sink)
    code = 0
    try:
        broker.run()
    except EOFError:
        pass
    except ShardwiseError as error:
        write_frame(sink, Broken(failure=FailureNote.of(error)))
        code = 1
    os._exit(code)  # Ray's own way out may take seconds; its raylet sees the closed socket at once


if __name__ == "__main__":
    main()
