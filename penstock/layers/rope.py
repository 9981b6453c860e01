"""The table of rotary angles for a whole context, computed once when the model is built."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from penstock.ops import rope_table


def inverse_frequencies(theta: float, rotary_dim: int) -> Tensor:  # [rot/2] float32
    """1 / theta^(2j / rot), as the float32 reciprocal of a float32 power: any other rounding drifts
    over a long context.
    """
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
    return 1.0 / theta**exponents


FIRST_POSITIONS = 2**18


class Rope(nn.Module):
    """A buffer with the table. It is computed, so no checkpoint has it; build it on its device.

    On a CPU it holds only the first positions until `reach` asks for more: a config may name a
    context of millions, for which there is no memory.
    """

    table: Tensor  # [positions, 2, rot/2] float32

    def __init__(
        self, inv_freq: Tensor, max_len: int, device: torch.device | str, scale: float = 1.0
    ) -> None:
        super().__init__()
        self._inv_freq, self._scale = inv_freq, scale
        if torch.device(device).type == "meta":
            # Only the size: computing on meta would import torch's compiler, which takes a second.
            table = torch.empty(max_len, 2, len(inv_freq), device=device)
        else:
            on_cpu = torch.device(device).type == "cpu"
            num_rows = min(max_len, FIRST_POSITIONS) if on_cpu else max_len
            table = rope_table(inv_freq.to(device), num_rows, scale)
        self.register_buffer("table", table, persistent=False)

    def reach(self, num_positions: int) -> None:
        if num_positions > len(self.table):
            inv_freq = self._inv_freq.to(self.table.device)
            self.table = rope_table(inv_freq, num_positions, self._scale)

    def rows(self, num_rows: int) -> Tensor:  # [num_rows, 2, rot/2]
        """The first positions of the table, on the host, whatever device the model is on."""
        return rope_table(self._inv_freq, num_rows, self._scale)
