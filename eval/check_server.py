"""`python -m eval.check_server`: what `penstock eval check-server` does, flags included."""

import sys

from penstock.cli import main

if __name__ == "__main__":
    sys.exit(main(["eval", "check-server", *sys.argv[1:]]))
