"""The dashboard's and the chat page's files: part of the package, no build step, nothing from the internet."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter
from starlette.responses import FileResponse, Response
from starlette.staticfiles import StaticFiles

STATIC = Path(__file__).resolve().parent.parent / "static"
router = APIRouter()


@router.get("/", include_in_schema=False)
def dashboard() -> Response:
    """The home as it is."""
    return FileResponse(STATIC / "index.html", headers={"Cache-Control": "no-cache"})


@router.get("/chat", include_in_schema=False)
def chat() -> Response:
    """Talk to the model."""
    return FileResponse(STATIC / "chat.html", headers={"Cache-Control": "no-cache"})


@router.get("/favicon.ico", include_in_schema=False)
def icon() -> Response:
    """The mark."""
    return FileResponse(STATIC / "icon.svg", media_type="image/svg+xml")


def static_files() -> StaticFiles:
    """Everything under `/static`."""
    return StaticFiles(directory=STATIC)
