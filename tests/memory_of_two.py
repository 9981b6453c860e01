"""One of two processes that share a GPU's memory, for `test_all_reduce.py`. Prints its sums.

NCCL refuses two ranks on one GPU, so gloo agrees here, on the host.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.parallel import one_shot
from penstock.parallel.links import GroupLinks


class HostLinks(GroupLinks):
    def _reduce(self, values: Tensor, operation: Any) -> None:
        if self.one_shot is not None and self.one_shot.can_reduce(values):
            self.one_shot.reduce(values)
        else:
            on_host = values.cpu()
            super()._reduce(on_host, operation)
            values.copy_(on_host)


def main() -> None:
    path, rank = Path(sys.argv[1]), int(sys.argv[2])
    device = torch.device("cuda", 0)
    one_shot._check_access = lambda device, size: None  # there is one GPU
    links = HostLinks.of_file(path, rank, 2, torch.device("cpu"))
    why_not = one_shot.connect(links, str(path), rank, 2, device)
    assert not why_not, why_not
    for call in range(8):
        values = torch.full((4096,), 10.0 * call + rank, device=device, dtype=torch.bfloat16)
        links.add(values)
        assert values.eq(20 * call + 1).all(), (call, values)
    print("right")


main()
