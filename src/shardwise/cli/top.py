"""`shardwise top`: the dashboard in a terminal."""

from __future__ import annotations

from typing import Annotated

import typer

from shardwise.cli.common import output


def top(
    url: Annotated[str, typer.Argument(help="Where 'shardwise serve' runs.")] = "http://127.0.0.1:8000",
    api_key: Annotated[str, typer.Option("--api-key", envvar="SHARDWISE_API_KEY", help="Where the server has keys.")] = "",
    interval: Annotated[float, typer.Option("--interval", help="Seconds between two pictures.", min=0.2, max=60)] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="One picture, and end.")] = False,
) -> None:
    """Nodes, stages, boundaries, requests and events, live."""
    from shardwise.clock import SystemClock
    from shardwise.server import top as view

    if output().json:
        output().document(view.fetch_picture(url, api_key))
    elif once:
        output().plain(view.draw(view.fetch_picture(url, api_key)))
    else:
        view.watch(url, api_key, SystemClock(), output().stdout, interval_s=interval)
