"""A process with one secured listening socket that sends everything back; for measuring what strangers cost it.

Standard input: the friend's public key on a line. Standard output: port and public key. Ends when standard input closes.
"""

from __future__ import annotations

import os
import sys
import threading

import zmq

from shardwise.transport.security import AllowList, Authenticator, NodeKeys, secure_server, sender_key


def main() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    keys, allowed = NodeKeys.generate(), AllowList()
    allowed.allow(sys.stdin.readline().strip(), "friend")
    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
    with Authenticator(context, allowed), context.socket(zmq.ROUTER) as socket:
        secure_server(socket, keys)
        print(socket.bind_to_random_port("tcp://127.0.0.1"), keys.public, flush=True)
        while True:
            frames = socket.recv_multipart(copy=False)
            if allowed.permits(sender_key(frames[-1])):
                socket.send_multipart(frames)


if __name__ == "__main__":
    main()
