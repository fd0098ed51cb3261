"""Which commands there are, in the order in which people meet them."""

from __future__ import annotations

import typer

from shardwise.cli.advise import advise
from shardwise.cli.bench import app as bench
from shardwise.cli.chat import chat
from shardwise.cli.cluster import app as cluster
from shardwise.cli.describe import describe
from shardwise.cli.doctor import doctor
from shardwise.cli.pack import pack
from shardwise.cli.plan import plan
from shardwise.cli.probe import probe
from shardwise.cli.run import run
from shardwise.cli.serve import serve
from shardwise.cli.top import top
from shardwise.cli.verify import verify


def register(app: typer.Typer) -> None:
    """Add every command to the program."""
    app.command("describe", help="Layers, bytes, FLOPs and KV of a model, and what can be split how.")(describe)
    app.command("pack", help="Write every stage's slice and a manifest with checksums.")(pack)
    app.command("verify", help="Check every bit of a packed folder.")(verify)
    app.command("run", help="Generate once, streamed; then show where the time went.")(run)
    app.command("chat", help="A conversation.")(chat)
    app.command("serve", help="OpenAI-compatible API, metrics, dashboard.")(serve)
    app.command("top", help="The dashboard in a terminal.")(top)
    app.add_typer(bench, name="bench")
    app.add_typer(cluster, name="cluster")
    app.command("probe", help="Measure this machine, or all machines of its cluster and every link.")(probe)
    app.command("plan", help="The best split, its predictions, alternatives and rejections.")(plan)
    app.command("advise", help="Should I split at all? Verdict first.")(advise)
    app.command("doctor", help="What on this machine would stop it, and the cure.")(doctor)
