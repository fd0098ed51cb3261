"""The live view in a terminal: the same picture that the dashboard draws, read from `/api/status`.

Fails with `NetworkError`s where nobody answers, `AuthenticationFailed` where the key is wrong.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

from rich.bar import Bar
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from shardwise.clock import Clock
from shardwise.errors import AuthenticationFailed, ConnectFailed, NetworkError, ReplyTimeout
from shardwise.units import format_bytes, format_duration

_STATE = {"ready": "green", "loading": "yellow", "gone": "bold red", "generating": "green", "waiting": "yellow", "paused": "red"}
_BLOCKS = " ▁▂▃▄▅▆▇█"


def fetch_picture(url: str, key: str = "", *, timeout_s: float = 10.0) -> dict[str, Any]:
    """The picture of this moment. An address without a scheme is taken for http."""
    if "://" not in url:
        url = f"http://{url}"
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        request = urllib.request.Request(f"{url.rstrip('/')}/api/status", headers=headers)
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            picture = json.loads(answer.read())
    except urllib.error.HTTPError as error:
        with error:
            if error.code == 401:
                raise AuthenticationFailed(
                    "the server wants an API key", where=url, hint="give --api-key or SHARDWISE_API_KEY"
                ) from error
            raise NetworkError(f"the server answered {error.code}", where=url) from error
    except TimeoutError as error:
        raise ReplyTimeout(f"no answer within {timeout_s:g} s", where=url) from error
    except (OSError, ValueError) as error:
        raise ConnectFailed(
            f"no shardwise server answers: {error}", where=url, hint="start one with 'shardwise serve'"
        ) from error
    if not isinstance(picture, dict) or "availability" not in picture:
        raise NetworkError("what answers is not a shardwise server", where=url)
    return picture


def watch(
    url: str, key: str, clock: Clock, console: Console, *, interval_s: float, until: Callable[[], bool] = lambda: False
) -> None:
    """Draw until interrupted; a server that goes away is said so, and awaited."""
    picture = fetch_picture(url, key)
    with Live(draw(picture), console=console, screen=console.is_terminal, auto_refresh=False) as live:
        while not until():
            clock.sleep(interval_s)
            try:
                live.update(draw(fetch_picture(url, key)), refresh=True)
            except NetworkError as error:
                live.update(Group(Text(f"connection lost: {error.one_line()}", style="bold red"), draw(picture)), refresh=True)


def draw(picture: dict[str, Any]) -> RenderableType:
    """One screen."""
    parts: list[RenderableType] = [_headline(picture)]
    if picture.get("stages"):
        parts += [Panel(_stages(picture), title="stages", title_align="left", border_style="dim")]
    if picture.get("boundaries"):
        parts += [Panel(_boundaries(picture), title="boundaries, p50 of a token", title_align="left", border_style="dim")]
    parts += [Panel(_requests(picture), title="requests", title_align="left", border_style="dim")]
    parts += [Panel(_events(picture), title="what happened", title_align="left", border_style="dim")]
    return Group(*parts)


def _headline(picture: dict[str, Any]) -> Text:
    said = picture["availability"]
    style = {"ready": "bold green", "loading": "bold yellow", "draining": "bold yellow"}.get(said["status"], "bold red")
    text = Text("shardwise ", style="bold")
    if model := picture.get("model"):
        text.append(f"{model['name']} {model['quantization']}  ")
    text.append(said["status"].replace("_", " "), style=style)
    if said["reason"]:
        text.append(f" {said['reason']}")
    if said["progress"] is not None and said["status"] == "loading":
        text.append(f" {said['progress']:.0%}")
    rates = [one["tokens_per_s"] for one in picture["history"]][-48:]
    text.append(f"   {rates[-1] if rates else 0:.0f} tokens/s ")
    top = max([1.0, *rates])
    text.append("".join(_BLOCKS[round(8 * rate / top)] for rate in rates), style="cyan")
    return text


def _stages(picture: dict[str, Any]) -> Table:
    table = _table("stage", "machine", "state", "layers", "holds", "KV tokens", "compute p50", "rows", "process")
    for stage in picture["stages"]:
        state = stage["state"]
        held = stage["weight_bytes"] + stage["kv_bytes"] + stage["workspace_bytes"]
        compute = stage.get("compute_s") or {}
        table.add_row(
            str(stage["index"]),
            stage["node"],
            Text(state, style=_STATE.get(state, "yellow")),
            f"{stage['layers'][0]}-{stage['layers'][1] - 1}",
            format_bytes(held),
            _kv(stage),
            format_duration(compute["p50"]) if compute.get("n") else "-",
            f"{stage['rows_per_step']:.1f}" if stage.get("rows_per_step") else "-",
            str(stage["pid"] or "-"),
        )
    return table


def _kv(stage: dict[str, Any]) -> RenderableType:
    if stage.get("kv_tokens") is None:
        return "-"
    grid = Table.grid(padding=(0, 1))
    grid.add_row(Bar(stage["kv_capacity_tokens"], 0, stage["kv_tokens"], width=10, color="cyan"), f"{stage['kv_tokens']:,}")
    return grid


def _boundaries(picture: dict[str, Any]) -> Table:
    table = _table("from", "to", "transfer", "copy", "wait", "predicted transfer", "bytes a token")
    for one in picture["boundaries"]:
        measured, guess = one["measured"], one["predicted"]
        table.add_row(
            f"{one['from_stage']} {one['source']}",
            f"{one['to_stage']} {one['target']}",
            *(format_duration(measured[part]["p50"]) for part in ("transfer_s", "copy_s", "wait_s")),
            format_duration(guess["transfer_s"]["p50"]) if guess else "-",
            format_bytes(one["bytes_per_token"]),
        )
    return table


def _requests(picture: dict[str, Any]) -> RenderableType:
    if not picture["requests"]:
        return Text(f"nobody is asking; {picture['totals']['generated_tokens']:,} tokens so far", style="dim")
    table = _table("request", "who", "state", "prompt", "generated", "tokens/s", "first token", "age")
    for one in picture["requests"][:20]:
        table.add_row(
            one["id"][:14],
            f"{one['client']} {one['endpoint']}",
            Text(one["state"], style=_STATE.get(one["state"], "")),
            str(one["prompt_tokens"]),
            str(one["generated_tokens"]),
            f"{one['tokens_per_s']:.1f}" if one["tokens_per_s"] is not None else "-",
            format_duration(one["time_to_first_token_s"]) if one["time_to_first_token_s"] is not None else "-",
            format_duration(one["age_s"]),
        )
    return table


def _events(picture: dict[str, Any]) -> Text:
    styles = {"good": "green", "bad": "bold red"}
    lines = [Text(one["text"], style=styles.get(one["kind"], "")) for one in picture["events"][-6:]]
    return Text("\n").join(lines)


def _table(*names: str) -> Table:
    table = Table(box=None, expand=True, header_style="dim")
    for name in names:
        table.add_column(name, no_wrap=True)
    return table
