"""The coordinator's mind: who may join, who is there, what each node is told. No socket, thread or process.

Requests with the sender's proved key flow in, replies out; time comes from a `Clock`, states from `membership`.
**Promises** a node is ready only while Ray's head has its raylet; an invite is used up only by a machine that fits; a
node's older process is refused as soon as a newer one beat; a revoked key is out at once and Ray gets a new token.
**Fails with** `AuthenticationFailed` (the key may not ask this), `CompatibilityError` (versions), each as an answer.
**Called by** the coordinator's daemon, the simulator.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable

from shardwise.clock import Clock
from shardwise.cluster.control import (
    Beat,
    BeatAnswer,
    Done,
    DrainRequest,
    Goodbye,
    InviteMade,
    InviteRequest,
    JoinGranted,
    JoinRequest,
    ListRequest,
    NodeCard,
    NodeList,
    Reply,
    Request,
    RevokeRequest,
    ShownNode,
    StopRequest,
)
from shardwise.cluster.membership import (
    AnyEvent,
    BecameReady,
    DrainAsked,
    Heard,
    Joined,
    Left,
    Member,
    Membership,
    NodeState,
    NotReady,
    Policy,
    SleepAnnounced,
    Tick,
    Transition,
    advance,
    forget,
    free_name,
)
from shardwise.cluster.ray_engine.head import HeadNews
from shardwise.cluster.ray_engine.tls import TlsAuthority, TlsMaterial
from shardwise.cluster.state import ClusterFile
from shardwise.cluster.versions import require_same_versions
from shardwise.errors import AuthenticationFailed, CompatibilityError, UsageError
from shardwise.records import replace
from shardwise.transport.security import AllowList, InviteBook, fingerprint

BEAT_EVERY_S = 0.5
NODE_POLICY = Policy(suspect_after_s=2.5, gone_after_s=12.0)  # a busy machine may miss beats; workers are watched by others


class Coordinator:
    """See the module. `changed` is called when the cluster file or the allow-list must be written."""

    def __init__(
        self,
        cluster: ClusterFile,
        card: NodeCard,
        allowed: AllowList,
        invites: InviteBook,
        clock: Clock,
        changed: Callable[[ClusterFile], None],
        policy: Policy = NODE_POLICY,
        authority: TlsAuthority | None = None,
    ) -> None:
        self.cluster = cluster
        self.card = card
        self.membership = Membership()
        self.closing = False
        self.head_start = 0  # the last start of Ray's head that came up
        self.news: HeadNews | None = None  # of Ray's head; None: not asked, nodes are believed
        self.transitions: list[Transition] = []
        self._allowed, self._invites, self._clock, self._changed, self._policy = allowed, invites, clock, changed, policy
        self._authority = authority
        self._cards: dict[str, NodeCard] = {}
        self._skews_s: dict[str, float] = {}
        self._raylets: dict[str, int | None] = {}  # which start of its raylet runs, as each node says; None: none
        self._identity = fingerprint(card.public)
        self._take_card(self._identity, card)
        self._apply(Joined(identity=self._identity, name=card.name, address=card.address))

    def handle(self, request: Request, sender: str) -> Reply:
        """Answer one request of the holder of a key."""
        match request:
            case JoinRequest():
                return self._join(request, sender)
            case Beat():
                return self._beat(request, sender)
            case Goodbye():
                identity = self._node(sender)
                if not request.asleep:
                    self._require_other(sender, "leave")
                self._apply(SleepAnnounced(identity=identity) if request.asleep else Left(identity=identity))
                if not request.asleep:
                    self._allowed.remove(sender)
                    self._changed(self.cluster)
                return Done()
            case DrainRequest():
                self._apply(DrainAsked(identity=self._drained(request.name, sender)))
                return Done()
            case ListRequest():
                self._node(sender)
                return self.listing()
            case InviteRequest():
                self._owner(sender)
                invite = self._invites.issue(
                    self.cluster.coordinator_addresses, self.card.public, valid_s=max(1.0, request.valid_s)
                )
                return InviteMade(invite=invite.encode())
            case RevokeRequest():
                return self._revoke(request.name, sender)
            case StopRequest():
                self._owner(sender)
                self.closing = True
                return Done()

    def tick(self, *, own_raylet: int | None) -> None:
        """Let time pass; the coordinator's own node lives as long as this is called. `own_raylet`: its start, if it runs."""
        self._apply(Heard(identity=self._identity))
        self._raylets[self._identity] = own_raylet
        for member in self.membership.usable():
            self._judge(member.identity)  # Ray's head may have lost it, or ended itself
        self._judge(self._identity)
        self._apply(Tick())

    def listing(self) -> NodeList:
        """Everybody who is not forgotten."""
        now_s = self._clock.now_s()
        shown = [
            ShownNode(
                member=member,
                card=self._cards[member.identity],
                coordinator=member.identity == self._identity,
                silent_s=max(0.0, now_s - member.heard_s),
                clock_skew_s=self._skews_s[member.identity],
            )
            for member in self.membership.members
        ]
        return NodeList(cluster_id=self.cluster.cluster_id, cluster_name=self.cluster.cluster_name, nodes=tuple(shown))

    def take_address(self, address: str, ray_head: str, control_addresses: tuple[str, ...]) -> None:
        """This machine has another address now."""
        self.card = replace(self.card, address=address)
        self._take_card(self._identity, self.card)
        self._apply(Heard(identity=self._identity, address=address))
        self.cluster = replace(self.cluster, ray_head=ray_head, coordinator_addresses=control_addresses)
        self._changed(self.cluster)

    def _join(self, request: JoinRequest, sender: str) -> Reply:
        entry = self._allowed.find(sender)
        if entry is None or entry.role != "invite":
            raise AuthenticationFailed("only an invite can join", where=request.card.name, hint="'shardwise cluster invite'")
        require_same_versions(self.card, request.card, control_version=request.version)
        identity = fingerprint(request.card.public)
        if identity == self._identity:
            raise UsageError("this is the machine that the cluster was made on", where=request.card.name, hint="it is in already")
        name = free_name(self.membership, request.card.name, identity)
        self._invites.redeem(sender, request.card.public, name)
        self._take_card(identity, request.card)
        self._apply(Joined(identity=identity, name=name, address=request.card.address))
        self._changed(self.cluster)
        return JoinGranted(
            cluster_id=self.cluster.cluster_id,
            cluster_name=self.cluster.cluster_name,
            name=name,
            coordinator_public=self.card.public,
            coordinator_addresses=self.cluster.coordinator_addresses,
            ray_head=self.cluster.ray_head,
            ray_token=self.cluster.ray_token,
            beat_every_s=BEAT_EVERY_S,
            tls=self._certificate(name, request.card.address),
        )

    def _beat(self, beat: Beat, sender: str) -> Reply:
        identity = self._node(sender)
        if beat.card.public != sender:
            raise AuthenticationFailed("a node speaks for itself only", where=beat.card.name)
        self._take_card(identity, beat.card)
        member = self.membership.find(identity)
        if member is None or beat.incarnation == 0:  # a new process of the node, or this coordinator is new
            self._apply(Joined(identity=identity, name=beat.card.name, address=beat.card.address, incarnation=beat.incarnation))
        elif beat.incarnation < member.incarnation:
            raise CompatibilityError(
                "another process beats for this node", where=member.name, hint="one machine joins once; the newest one counts"
            )
        self._apply(Heard(identity=identity, incarnation=beat.incarnation, address=beat.card.address))
        self._raylets[identity] = beat.raylet_start if beat.raylet_alive else None
        self._judge(identity)
        member = self._member(identity)
        fresh = beat.tls_address != beat.card.address
        answer = BeatAnswer(
            name=member.name,
            state=member.state,
            incarnation=member.incarnation,
            ray_head=self.cluster.ray_head,
            ray_token=self.cluster.ray_token,
            closing=self.closing,
            tls=self._certificate(member.name, beat.card.address) if fresh else None,
            head_start=self.head_start,
            raylet_lost=self.news is not None and self.news.answers and not self._is_listed(identity),
        )
        if self.closing:  # the node ends with this answer: nobody need wait for it
            self._apply(Left(identity=identity))
        return answer

    def _certificate(self, name: str, address: str) -> TlsMaterial | None:
        return self._authority.issue(name, address) if self._authority is not None else None

    def _is_listed(self, identity: str) -> bool:
        """Whether the node's raylet runs, and Ray's head has that very one."""
        raylet = self._raylets.get(identity)
        return raylet is not None and (self.news is None or (identity, raylet) in self.news.raylets)

    def _judge(self, identity: str) -> None:
        """Whether work can be placed on a node."""
        if not self._is_listed(identity):
            runs = self._raylets.get(identity) is not None
            reason = "Ray's head does not have it" if runs else "Ray does not run there"
            self._apply(NotReady(identity=identity, reason=reason))
        elif self._member(identity).state is NodeState.JOINING:
            self._apply(BecameReady(identity=identity))

    def _revoke(self, name: str, sender: str) -> Reply:
        self._owner(sender)
        self._require_other(name, "revoke")
        for entry in self._allowed.revoke(name):
            self.membership = forget(self.membership, fingerprint(entry.public))
        self.cluster = replace(self.cluster, ray_token=secrets.token_hex(32))  # the old one is known to who left
        self._changed(self.cluster)
        return Done()

    def _drained(self, name: str, sender: str) -> str:
        if not name:
            return self._node(sender)
        member = self.membership.named(name)
        if member is None:
            known = ", ".join(m.name for m in self.membership.members)
            raise UsageError(f"no node '{name}'", where="drain", hint=f"there are: {known}")
        if member.identity != self._node(sender):
            self._owner(sender)
        return member.identity

    def _node(self, sender: str) -> str:
        entry = self._allowed.find(sender)
        if sender != self.card.public and (entry is None or entry.role == "invite"):
            raise AuthenticationFailed("an invite may only join", where="control", hint="run 'shardwise cluster join'")
        return fingerprint(sender)

    def _owner(self, sender: str) -> None:
        if sender != self.card.public:
            raise AuthenticationFailed(
                "only the machine that the cluster was made on may do this", where="control", hint="run the command there"
            )

    def _require_other(self, key_or_name: str, command: str) -> None:
        """Without the coordinator's own key nothing would be left but to end the cluster."""
        if key_or_name in (self.card.public, self.card.name, self._member(self._identity).name):
            done = "be banned from" if command == "revoke" else "leave"
            raise UsageError(
                f"the coordinator cannot {done} its own cluster",
                where=f"cluster {command}",
                hint="'shardwise cluster down' ends it",
            )

    def _member(self, identity: str) -> Member:
        member = self.membership.find(identity)
        assert member is not None
        return member

    def _take_card(self, identity: str, card: NodeCard) -> None:
        self._cards[identity] = card
        self._skews_s[identity] = card.wall_s - self._clock.wall_s() if card.wall_s else 0.0

    def _apply(self, event: AnyEvent) -> None:
        self.membership, transitions = advance(self.membership, event, self._clock.now_s(), self._policy)
        self.transitions += transitions
        del self.transitions[:-1000]
