"""`python -m eval.correctness.run_correctness`: what `penstock eval correctness` does, flags
included.
"""

import sys

from penstock.cli import main

if __name__ == "__main__":
    sys.exit(main(["eval", "correctness", *sys.argv[1:]]))
