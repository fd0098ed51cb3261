"""The dry run of a Hugging Face folder: what `shardwise describe --tp` shows. Reads `config.json` only; no weight is touched.

What can fail: transformers is not installed (MissingExtraError), a folder without a readable config, an architecture that
transformers does not know, a model without a plan (UsageError).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shardwise.errors import MissingExtraError, UnsupportedModelError, UsageError, pip_command
from shardwise.tp.loading import empty_model
from shardwise.tp.report import TpReport, report


def report_folder(
    folder: str | Path,
    plan: Mapping[str, Any] | None = None,
    shares: Sequence[float] | None = None,
    *,
    degree: int | None = None,
    rows: int = 1,
) -> TpReport:
    """`report` for the model that a folder's config describes, built without weights."""
    try:
        import transformers
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            "reading a Hugging Face folder as a module needs transformers", hint=pip_command("transformers")
        ) from error
    path = Path(folder)
    if not (path / "config.json").is_file():
        raise UsageError("no config.json here", where=str(path), hint="give a Hugging Face folder")
    try:
        config = transformers.AutoConfig.from_pretrained(path)
        model = empty_model(lambda: transformers.AutoModelForCausalLM.from_config(config))
    except (OSError, ValueError, KeyError) as error:
        message = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UnsupportedModelError(f"transformers cannot build this model: {message}", where=str(path)) from error
    return report(model, plan, shares, degree=degree, rows=rows)
