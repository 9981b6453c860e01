"""`python -m eval.latency.run_latency`: what `penstock eval latency` does, flags included."""

import sys

from penstock.cli import main

if __name__ == "__main__":
    sys.exit(main(["eval", "latency", *sys.argv[1:]]))
