"""`python -m penstock` is `penstock`: it does not import from the working directory either."""

import sys
from pathlib import Path

if __name__ == "__main__":
    if not sys.flags.safe_path:  # then the working directory stands in front
        folder = sys.path.pop(0)
        if (
            Path(folder).resolve() == Path(__file__).resolve().parents[1]
        ):  # a checkout that is not installed
            sys.path.append(folder)

    from penstock.cli import main

    sys.exit(main())
