"""What on this machine would stop shardwise, and the cure: facts are gathered, rules judge them."""

from shardwise.probe.doctor.facts import Facts
from shardwise.probe.doctor.gather import gather
from shardwise.probe.doctor.rules import Finding, examine

__all__ = ["Facts", "Finding", "examine", "gather"]
