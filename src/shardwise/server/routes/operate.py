"""The dashboard's operations; 409 where the server was not given the means (it only serves a deployment made elsewhere)."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends
from pydantic import Field

from shardwise.errors import ShardwiseError
from shardwise.records import plain
from shardwise.server.operations import Operator
from shardwise.server.planning import in_thread
from shardwise.server.problems import Problem, from_error
from shardwise.server.routes.documents import ERRORS, ok
from shardwise.server.schemas.common import Body
from shardwise.server.state import ServerState, state_of

router = APIRouter(prefix="/api")


class Split(Body):
    """Layers of each stage."""

    layers: Annotated[list[Annotated[int, Field(ge=1, le=100_000)]], Field(min_length=1, max_length=1024)]


class Node(Body):
    """A machine's name."""

    node: Annotated[str, Field(max_length=256)]


class Nothing(Body):
    """No fields."""


def operator_of(state: Annotated[ServerState, Depends(state_of)]) -> Operator:
    """The operator, as a dependency."""
    if state.operator is None:
        raise Problem(409, "this server cannot operate its deployment", code="not_operable")
    return state.operator


Operating = Annotated[Operator, Depends(operator_of)]
_ANSWERS = ERRORS | {409: {"description": "Not possible here", "model": ERRORS[400]["model"]}}


@router.post("/drain", responses=_ANSWERS | ok("draining"))
async def drain(_: Nothing, operator: Operating, state: Annotated[ServerState, Depends(state_of)]) -> dict[str, str]:
    """Accept nothing new."""
    state.slot.drain()
    return {"status": "draining"}


@router.post("/resume", responses=_ANSWERS | ok("accepting"))
async def resume(_: Nothing, operator: Operating, state: Annotated[ServerState, Depends(state_of)]) -> dict[str, str]:
    """Accept requests again."""
    state.slot.resume()
    return {"status": "accepting"}


@router.post("/stop", responses=_ANSWERS | ok("stopping"))
async def stop(_: Nothing, operator: Operating) -> dict[str, str]:
    """Let the running requests end, then free the machines."""
    operator.stop()
    return {"status": "stopping"}


@router.post("/start", responses=_ANSWERS | ok("starting"))
async def start(_: Nothing, operator: Operating) -> dict[str, str]:
    """Load the model again."""
    operator.start()
    return {"status": "starting"}


@router.post("/restart", responses=_ANSWERS | ok("restarting"))
async def restart(body: Node, operator: Operating) -> dict[str, str]:
    """Replace a machine's workers one by one; sessions go on."""
    await in_thread(lambda: operator.restart_node(body.node))
    return {"status": "restarting"}


@router.post("/leave", responses=_ANSWERS | ok("leaving"))
async def leave(body: Node, operator: Operating) -> dict[str, str]:
    """Move every stage away from a machine that is to be switched off."""
    await in_thread(lambda: operator.leave_node(body.node))
    return {"status": "leaving"}


@router.post("/replan/preview", responses=_ANSWERS | ok("what would move"))
async def preview(body: Split, operator: Operating) -> dict[str, Any]:
    """Which layers would change hands."""
    return _plain(operator, body)


@router.post("/replan/apply", responses=_ANSWERS | ok("moving"))
async def apply(body: Split, operator: Operating) -> dict[str, Any]:
    """Drain, and launch with the other split."""
    previewed = _plain(operator, body)
    operator.apply(tuple(body.layers))
    return previewed


def _plain(operator: Operator, body: Split) -> dict[str, Any]:
    try:
        found: dict[str, Any] = plain(operator.preview(tuple(body.layers)))
    except ShardwiseError as error:
        raise from_error(error) from error
    return found
