"""The program: `shardwise`, or `python -m shardwise`."""

import signal

if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # while it loads, an interrupt just ends it; `main` takes over then

from shardwise.cli.main import main

if __name__ == "__main__":
    main()
