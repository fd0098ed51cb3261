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
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.panel import Panel
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from shardwise.clock import Clock
from shardwise.errors import AuthenticationFailed, ConnectFailed, NetworkError, ReplyTimeout
from shardwise.units import format_bytes, format_duration

_STATE = {"ready": "green", "loading": "yellow", "gone": "bold red", "generating": "green", "waiting": "yellow", "paused": "red"}
_BLOCKS = " ▁▂▃▄▅▆▇█"
_WIDE = 110  # columns; narrower terminals get no frames, bars and ids, so that nothing is cut at 80


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
            f"no shardwise server answers: {_reason(error)}", where=url, hint="start one with 'shardwise serve'"
        ) from error
    if not isinstance(picture, dict) or "availability" not in picture:
        raise NetworkError("what answers is not a shardwise server", where=url)
    return picture


def _reason(error: Exception) -> str:
    """What the system says, without the wrapping of `urllib`."""
    inner = error.reason if isinstance(error, urllib.error.URLError) else error
    return (inner.strerror if isinstance(inner, OSError) else "") or str(inner)


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
    """One screen, as wide as the terminal is."""
    return _Screen(picture)


class _Screen:
    """Chooses by the width what is shown."""

    def __init__(self, picture: dict[str, Any]) -> None:
        self._picture = picture

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        picture, wide = self._picture, options.max_width >= _WIDE
        yield _headline(picture, options.max_width)
        parts: list[tuple[str, RenderableType]] = []
        if picture.get("stages"):
            parts.append(("stages", _stages(picture, wide)))
        if picture.get("boundaries"):
            parts.append(("boundaries, p50 of a token", _boundaries(picture)))
        parts += [("requests", _requests(picture, wide)), ("what happened", _events(picture))]
        for title, part in parts:
            if wide:
                yield Panel(part, title=title, title_align="left", border_style="dim")
            else:
                yield Rule(Text(title), align="left", style="dim")
                yield part


def _headline(picture: dict[str, Any], width: int) -> Text:
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
    shown = rates[-max(1, width - text.cell_len) :] if text.cell_len < width else []
    top = max([1.0, *rates])
    text.append("".join(_BLOCKS[round(8 * rate / top)] for rate in shown), style="cyan")
    return text


def _stages(picture: dict[str, Any], wide: bool) -> Table:
    table = _table(
        "#", "machine", "state", "layers", "holds", "KV\ntokens", "compute\np50", "rows", "process", folds=("machine",)
    )
    for stage in picture["stages"]:
        state = stage["state"]
        held = stage["weight_bytes"] + stage["kv_bytes"] + stage["workspace_bytes"]
        compute = stage.get("compute_s") or {}
        _add(
            table,
            str(stage["index"]),
            stage["node"],
            Text(state, style=_STATE.get(state, "yellow")),
            f"{stage['layers'][0]}-{stage['layers'][1] - 1}",
            format_bytes(held),
            _kv(stage, wide),
            format_duration(compute["p50"]) if compute.get("n") else "-",
            f"{stage['rows_per_step']:.1f}" if stage.get("rows_per_step") else "-",
            str(stage["pid"] or "-"),
        )
    return table


def _kv(stage: dict[str, Any], wide: bool) -> RenderableType:
    if stage.get("kv_tokens") is None:
        return "-"
    if not wide:
        return f"{stage['kv_tokens']:,}"
    grid = Table.grid(padding=(0, 1))
    grid.add_row(Bar(stage["kv_capacity_tokens"], 0, stage["kv_tokens"], width=10, color="cyan"), f"{stage['kv_tokens']:,}")
    return grid


def _boundaries(picture: dict[str, Any]) -> Table:
    columns = ("from", "to", "transfer", "copy", "wait", "predicted\ntransfer", "bytes\na token")
    table = _table(*columns, folds=("from", "to"))
    for one in picture["boundaries"]:
        measured, guess = one["measured"], one["predicted"]
        _add(
            table,
            f"{one['from_stage']} {one['source']}",
            f"{one['to_stage']} {one['target']}",
            *(format_duration(measured[part]["p50"]) for part in ("transfer_s", "copy_s", "wait_s")),
            format_duration(guess["transfer_s"]["p50"]) if guess else "-",
            format_bytes(one["bytes_per_token"]),
        )
    return table


def _requests(picture: dict[str, Any], wide: bool) -> RenderableType:
    if not picture["requests"]:
        return Text(f"nobody is asking; {picture['totals']['generated_tokens']:,} tokens so far", style="dim")
    columns = ("who", "state", "prompt", "gene-\nrated", "tokens\n/s", "first\ntoken", "age")
    table = _table(*(("request",) if wide else ()), *columns, folds=("request", "who"))
    for one in picture["requests"][:20]:
        _add(
            table,
            *((one["id"],) if wide else ()),
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


def _table(*names: str, folds: tuple[str, ...] = ()) -> Table:
    """What does not fit goes on in the next line: names only, so that no figure is cut."""
    table = Table(box=None, expand=True, header_style="dim", padding=(0, 1, 0, 0))
    for name in names:
        table.add_column(name, no_wrap=name not in folds, overflow="fold")
    return table


def _add(table: Table, *cells: RenderableType) -> None:
    """A row; text as it is, without markup."""
    table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in cells))
