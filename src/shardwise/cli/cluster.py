"""`shardwise cluster`: make machines into one cluster. Each command is one function of `cluster.lifecycle`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from shardwise.cli.common import output

app = typer.Typer(no_args_is_help=True, help="Make machines into one cluster.", rich_markup_mode=None)

Name = Annotated[str, typer.Option("--name", help="What to call this machine (default: its host name).")]
Interface = Annotated[str, typer.Option("--interface", help="Network card or address to use, e.g. eth0 (default: the best).")]
Memory = Annotated[str, typer.Option("--memory", help="What a model may use here, e.g. '12 GiB' (default: as measured).")]
Port = Annotated[int, typer.Option("--port", min=1, max=65435, help="First of the hundred ports that are used.")]


def _bytes(text: str) -> int:
    from shardwise.units import parse_bytes

    return parse_bytes(text, field="--memory") if text else 0


def _show_invite(invite: str) -> None:
    out = output()
    if out.json:
        out.document({"join": f"shardwise cluster join {invite}", "invite": invite})
        return
    out.note("On each other machine, within ten minutes, once a line:")
    print(f"shardwise cluster join {invite}")


@app.command("up", help="Make this machine the first of a cluster; prints the line for the next one.")
def up(
    name: Name = "",
    cluster_name: Annotated[str, typer.Option("--cluster-name", help="What to call the cluster.")] = "home",
    interface: Interface = "",
    memory: Memory = "",
    port: Port = 7700,
    dashboard: Annotated[bool, typer.Option("--ray-dashboard", help="Also start Ray's own dashboard.")] = False,
    ray_address: Annotated[str, typer.Option("--ray-address", help="Use a Ray that runs already (host:port).")] = "",
) -> None:
    import os

    from shardwise.cluster import lifecycle
    from shardwise.cluster.state import StateDir

    options = lifecycle.UpOptions(
        name=name,
        cluster_name=cluster_name,
        interface=interface,
        memory_bytes=_bytes(memory),
        port=port,
        dashboard=dashboard,
        ray_address=ray_address,
        ray_token=os.environ.get("RAY_AUTH_TOKEN", "") if ray_address else "",
    )
    _show_invite(lifecycle.up(StateDir(), options))


@app.command("invite", help="Print another line for one more machine.")
def invite(
    minutes: Annotated[float, typer.Option("--minutes", min=0.1, max=1440, help="How long it is valid.")] = 10.0,
) -> None:
    from shardwise.cluster import lifecycle
    from shardwise.cluster.state import StateDir

    _show_invite(lifecycle.invite(StateDir(), minutes * 60))


@app.command("join", help="Join a cluster with the line that 'up' or 'invite' printed.")
def join(
    invite: Annotated[str, typer.Argument(help="The invite: one word that starts with swi1_.")] = "",
    name: Name = "",
    interface: Interface = "",
    memory: Memory = "",
    port: Annotated[int, typer.Option("--port", min=0, max=65435, help="First port (default: the coordinator's).")] = 0,
) -> None:
    from shardwise.cluster import lifecycle
    from shardwise.cluster.state import StateDir

    if not invite.split():
        _propose(interface)
    invite = invite.split()[-1]  # the whole line in quotes will do
    options = lifecycle.JoinOptions(name=name, interface=interface, memory_bytes=_bytes(memory), port=port)
    cluster = lifecycle.join(StateDir(), invite, options)
    if output().json:
        output().document({"cluster": cluster.cluster_name, "cluster_id": cluster.cluster_id, "name": cluster.name})
    else:
        output().plain(f"joined '{cluster.cluster_name}' as '{cluster.name}'")


def _propose(interface: str) -> None:
    """Without an invite: name the clusters that could give one."""
    from shardwise.cluster import lifecycle
    from shardwise.errors import UsageError

    found = lifecycle.find(interface)
    names = ", ".join(f"'{c.name}' (on {c.coordinator})" for c in found)
    hint = f"run 'shardwise cluster invite' on {found[0].coordinator}" if found else "run 'shardwise cluster up' on one machine"
    raise UsageError(f"joining takes an invite; found on this network: {names or 'no cluster'}", where="cluster join", hint=hint)


@app.command("find", help="Clusters that announce themselves on this network.")
def find(
    interface: Interface = "",
    seconds: Annotated[float, typer.Option("--seconds", min=0.1, max=60, help="How long to listen.")] = 2.0,
) -> None:
    from shardwise.cluster import lifecycle
    from shardwise.records import plain

    found = lifecycle.find(interface, seconds)
    if output().json:
        output().document([plain(cluster) for cluster in found])
        return
    for cluster in found:
        output().plain(f"{cluster.name}  on {cluster.coordinator}  {', '.join(cluster.addresses)}  id {cluster.cluster_id}")
    if not found:
        output().note("no cluster announces itself here")


@app.command("nodes", help="Who is in the cluster and how they are.")
def nodes() -> None:
    from shardwise.cluster import lifecycle
    from shardwise.cluster.state import StateDir
    from shardwise.records import plain

    listing = lifecycle.nodes(StateDir())
    if output().json:
        output().document(plain(listing))
    else:
        _show_nodes(listing)


def _show_nodes(listing: Any) -> None:
    from rich.table import Table

    from shardwise.units import format_bytes, format_duration

    table = Table(title=f"{listing.cluster_name} ({listing.cluster_id})", title_justify="left")
    for heading in ("node", "state", "address", "memory", "cores", "heard", "note"):
        table.add_column(heading, overflow="fold")
    for shown in listing.nodes:
        member, card = shown.member, shown.card
        notes = [member.reason] if member.state not in ("ready",) else []
        if abs(shown.clock_skew_s) > 5:
            notes.append(
                f"its clock is {format_duration(abs(shown.clock_skew_s))} {'ahead' if shown.clock_skew_s > 0 else 'behind'}"
            )
        if shown.coordinator:
            notes.append("coordinator")
        heard = f"{format_duration(shown.silent_s)} ago"
        cells = (format_bytes(card.memory_bytes), str(card.num_cores), heard, "; ".join(notes))
        table.add_row(member.name, str(member.state), card.address, *cells)
    output().plain(table)


@app.command("leave", help="Take this machine out of the cluster.")
def leave(
    drain: Annotated[bool, typer.Option("--drain", help="First let its work move away.")] = False,
    wait: Annotated[float, typer.Option("--wait", min=0, help="Seconds to wait for that.")] = 60.0,
    asleep: Annotated[bool, typer.Option("--sleep", help="Only say that this machine goes to sleep now.")] = False,
) -> None:
    from shardwise.cluster import lifecycle
    from shardwise.cluster.state import StateDir

    if asleep:
        lifecycle.announce_sleep(StateDir())
        output().note("announced; this machine is expected back")
        return
    left = lifecycle.leave(StateDir(), drain_s=wait if drain else 0.0)
    if output().json:
        output().document({"left": True, "workers_ended": left})
    else:
        output().plain("left the cluster" + (f"; {left} workers were still here and were ended" if left else ""))


@app.command("drain", help="Give a node nothing new.")
def drain(name: Annotated[str, typer.Argument(help="Which node (default: this one).")] = "") -> None:
    from shardwise.cluster import lifecycle
    from shardwise.cluster.state import StateDir

    lifecycle.drain(StateDir(), name)
    output().note(f"draining {name or 'this machine'}")


@app.command("revoke", help="Ban a node for good; Ray gets a new token.")
def revoke(name: Annotated[str, typer.Argument(help="Which node.")]) -> None:
    from shardwise.cluster import lifecycle
    from shardwise.cluster.state import StateDir

    lifecycle.revoke(StateDir(), name)
    output().note(f"'{name}' is banned")


@app.command("down", help="End the cluster; on the machine that made it.")
def down() -> None:
    from shardwise.cluster import lifecycle
    from shardwise.cluster.state import StateDir

    lifecycle.down(StateDir())
    output().note("the cluster is down")


@app.command("start", help="Start this machine's part again, e.g. after a reboot (the service unit does it).")
def start(
    foreground: Annotated[bool, typer.Option("--foreground", help="Stay, for systemd and launchd.")] = False,
) -> None:
    from shardwise.cluster import lifecycle
    from shardwise.cluster.state import StateDir

    state = StateDir()
    state.load_cluster()
    if foreground:
        lifecycle.become_daemon(state)
    elif not lifecycle.daemon_runs(state):
        lifecycle.start_daemon(state)
    output().note("running")


@app.command("recipe", help="Print a file for systemd, launchd, Windows, KubeRay, Slurm or a container image.")
def recipe(name: Annotated[str, typer.Argument(help="Which one; without a name they are listed.")] = "") -> None:
    from shardwise.cluster.recipes import RECIPES
    from shardwise.cluster.recipes import recipe as text_of
    from shardwise.records import plain

    if name:
        text = text_of(name)
        if output().json:
            output().document({"name": name, "text": text})
        else:
            print(text, end="")
    elif output().json:
        output().document([plain(entry) for entry in RECIPES])
    else:
        for entry in RECIPES:
            output().plain(f"{entry.name:14} {entry.use}")


@app.command("propose", help="Would another plan be better now, by how much, and what would have to move?")
def propose(
    model: Annotated[str, typer.Argument(help="The model that runs.")],
    plan: Annotated[Path, typer.Option("--plan", help="The plan it runs by, made by 'plan --json'.")],
    cluster: Annotated[Path, typer.Option("--cluster", help="The cluster file as it is now, made by 'probe'.")],
    users: Annotated[int, typer.Option("--users", min=1, help="Sessions at once.")] = 1,
) -> None:
    from shardwise.cluster.proposing import propose_from_files
    from shardwise.records import plain

    found = propose_from_files(model, plan, cluster, num_users=users)
    if output().json:
        output().document(plain(found))
        return
    output().plain(found.message)
    for transfer in found.transfers:
        ranges = ", ".join(f"{start}-{end - 1}" for start, end in transfer.layers)
        output().plain(f"  {transfer.node} would get layers {ranges}")
