"""`python -m eval.score`: what `penstock eval score` does, flags included."""

import sys

from penstock.cli import main

if __name__ == "__main__":
    sys.exit(main(["eval", "score", *sys.argv[1:]]))
