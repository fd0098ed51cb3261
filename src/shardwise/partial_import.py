"""One module of a package, without what the package itself imports.

`import llama_cpp.llama_cpp` first runs `llama_cpp/__init__.py`, which loads jinja2, diskcache and a server's types (0.1 s);
`gguf.constants` likewise loads numpy and yaml. A process that only wants the C API, or the table of block sizes, waits for
none of that here. **Promises** the package stays whole for everybody else: it is run as usual as soon as anybody asks it for
a name that it does not have yet. **Fails with** `ImportError`, as `import` does. **Called by** `stage.llama.library`,
`model.quantization`.
"""

from __future__ import annotations

import importlib
import sys
import threading
from importlib.util import find_spec, module_from_spec
from types import ModuleType
from typing import Any

_lock = threading.RLock()


def import_alone(package: str, module: str) -> ModuleType:
    """`package.module` (of a package that is no part of another); where the package is loaded already, simply that."""
    with _lock:
        if package not in sys.modules:
            sys.modules[package] = _unrun(package)
        return importlib.import_module(f"{package}.{module}")


def _unrun(name: str) -> ModuleType:
    """A package that runs when a name is asked of it that it does not have."""
    spec = find_spec(name)
    if spec is None or spec.loader is None:
        raise ModuleNotFoundError(f"No module named '{name}'", name=name)
    package, loader = module_from_spec(spec), spec.loader

    def run_and_get(attribute: str) -> Any:
        with _lock:
            if package.__dict__.pop("__getattr__", None) is not None:
                loader.exec_module(package)
        return getattr(package, attribute)

    package.__dict__["__getattr__"] = run_and_get
    return package
