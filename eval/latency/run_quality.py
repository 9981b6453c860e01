"""`python -m eval.latency.run_quality`: what `penstock eval quality` does, flags included."""

import sys

from penstock.cli import main

if __name__ == "__main__":
    sys.exit(main(["eval", "quality", *sys.argv[1:]]))
