"""`python -m eval.report`: what `penstock eval report` does, flags included."""

import sys

from penstock.cli import main

if __name__ == "__main__":
    sys.exit(main(["eval", "report", *sys.argv[1:]]))
