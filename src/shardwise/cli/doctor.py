"""`shardwise doctor`: what on this machine would stop it, and the cure."""

from __future__ import annotations

from typing import Annotated

import typer

from shardwise.cli.common import output


def doctor(
    every: Annotated[bool, typer.Option("--all/--problems", help="Also what is fine, or problems only.")] = True,
) -> None:
    """What on this machine would stop shardwise, and the cure. Exit status 5 if anything would."""
    from shardwise.probe.doctor import examine, gather
    from shardwise.records import plain
    from shardwise.shards.cache_folder import default_cache

    facts = gather(cache=default_cache())
    findings = examine(facts)
    bad = any(f.level == "bad" for f in findings)
    if output().json:
        output().document({"ok": not bad, "findings": [plain(f) for f in findings]})
    else:
        marks = {"good": "ok  ", "warning": "warn", "bad": "BAD "}
        for finding in findings:
            if every or finding.level != "good":
                output().plain(f"{marks[finding.level]}  {finding.check:11} {finding.message}")
                if finding.cure:
                    output().plain(f"      {'':11} -> {finding.cure}")
    if bad:
        raise typer.Exit(5)
