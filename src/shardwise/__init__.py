"""shardwise: splits one model over the machines you own, and says when that is a bad idea."""

__version__ = "0.1.0"
