"""Before the first trial: which restrictions hold on this machine and leave its device usable.

All of them, where that works. Where it does not, one after the other in the order of what they are
worth: each that still lets the device compute stays. Whatever the kernel was asked for, what counts
is what a probe inside could then not do.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import PenstockError
from penstock.forge.sandbox import CandidateError, Sandbox

PROBE_S = 30.0


@dataclass(frozen=True, slots=True)
class Reach:
    """What a probe could do. Empty: it could; otherwise what was in its way."""

    device: str
    weights: str = ""
    network: str = ""
    outside: str = ""  # a file that is nobody's business

    @property
    def obstacle(self) -> str:
        return self.device or self.weights


def settle(sandbox: Sandbox) -> Reach:
    """Leaves the sandbox with the strongest restrictions that its device works under."""
    reached = probe(sandbox)
    if not reached.obstacle:
        return reached
    sandbox.restrictions = []
    if obstacle := probe(sandbox).obstacle:
        raise PenstockError(
            f"{sandbox.target.device} does not work in a process of its own, even without "
            "restrictions",
            obstacle,
            "Run `penstock inspect` to see whether it works at all.",
        )
    for restriction in sandbox.wanted:
        kept = sandbox.restrictions
        sandbox.restrictions = [*kept, restriction]
        if obstacle := probe(sandbox).obstacle:
            sandbox.given_up[restriction] = obstacle
            sandbox.restrictions = kept
    return probe(sandbox)


def probe(sandbox: Sandbox) -> Reach:
    """What can be done under the sandbox's present restrictions."""
    with tempfile.TemporaryDirectory(prefix="forge-outside-") as folder:
        words = {
            "device": sandbox.target.device,
            "compiled": str(_kernel_cache(sandbox)),
            "weights": str(sandbox.target.weight_dir / "model.pt"),
            "outside": str(Path(folder) / "reached"),
        }
        try:
            return Reach(**sandbox.reach(words, PROBE_S))
        except CandidateError as error:
            return Reach(device=str(error))


def _kernel_cache(sandbox: Sandbox) -> Path:
    """The candidates' own, which they find filled; but a kernel that was compiled under fewer
    restrictions would only be read under more.
    """
    own = sandbox.scratch / "compiled"
    return Path(tempfile.mkdtemp(dir=sandbox.scratch)) if own.exists() else own
