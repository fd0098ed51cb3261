"""`python -m shardwise.cli`."""

from shardwise.cli.main import main

if __name__ == "__main__":
    main()
