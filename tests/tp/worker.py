"""One rank of a test's process group: reads cases as JSON lines, answers with JSON lines. Started by `ranks.Ranks`."""

from __future__ import annotations

import datetime
import importlib
import json
import os
import sys
import traceback
import warnings
from typing import Any

import torch
import torch.distributed as dist


def main() -> None:
    rank, world, store, timeout_s = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], float(sys.argv[4])
    answers = os.dup(1)
    os.dup2(2, 1)  # whatever a library prints must not mix with the answers
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=datetime.timedelta(seconds=timeout_s)
    )
    with open(answers, "w") as pipe:
        print(json.dumps({"ready": os.getpid()}), file=pipe, flush=True)
        for line in sys.stdin:
            print(json.dumps(_answer(json.loads(line), rank, world)), file=pipe, flush=True)
    dist.destroy_process_group()
    os._exit(0)  # taking torch and transformers down module by module takes a second a rank


def _answer(request: dict[str, Any], rank: int, world: int) -> dict[str, Any]:
    module, _, function = request["case"].partition(":")
    try:
        with warnings.catch_warnings():
            result = getattr(importlib.import_module(module), function)(rank, world, **request["arguments"])
        return {"result": result}
    except Exception as error:  # noqa: BLE001 - the test process raises it
        return {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}


if __name__ == "__main__":
    main()
