"""What a deployment on a cluster does when the machines change, as a person chose it: a record, without what carries it out."""

from __future__ import annotations

from shardwise.records import Record

WORTH_SHARE = 0.10  # a plan must be better by this much before anybody is asked


class FollowPolicy(Record):
    """Without `cluster_file` a deployment does not plan."""

    auto: bool = False  # carry better plans out; False: only show them
    cluster_file: str = ""  # measured machines and links, made by `probe`; read again when it changes
    objective: str = "latency"
    least_gain_share: float = WORTH_SHARE
    settle_s: float = 3.0  # the machines must have been the same for this long
    between_moves_s: float = 120.0
    retry_s: float = 600.0  # after a move that failed
