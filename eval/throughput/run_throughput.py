"""`python -m eval.throughput.run_throughput`: what `penstock eval throughput` does, flags
included.
"""

import sys

from penstock.cli import main

if __name__ == "__main__":
    sys.exit(main(["eval", "throughput", *sys.argv[1:]]))
