"""Python processes that we start: they run our own files and import nothing from the working
directory.

`python -m` would put that folder before all others, and PYTHONPATH the folder of a checkout: a
timeit.py in either would be imported instead of the real one. Run as a program, this file starts
such a process.
"""

from __future__ import annotations

import importlib.util
import runpy
import sys
from pathlib import Path


def module_command(module: str, *words: str) -> list[str]:
    """The equivalent of `python -m` with these arguments."""
    return [sys.executable, "-P", __file__, module, *words]


def main() -> None:
    folder = Path(__file__).resolve().parent
    spec = importlib.util.spec_from_file_location(
        "penstock", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None
    assert spec.loader is not None
    sys.modules["penstock"] = package = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(package)
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
