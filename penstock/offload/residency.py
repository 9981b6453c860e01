"""Which experts stay in a tier: the slots of a device, or the records in RAM. Decides with numbers
and never touches a tensor.

Layers run one after the other, so the time until an expert is used again follows from its layer's
turn and from the probability that the layer chooses it:

    turns until next use  =  turns until its layer runs  +  layers * (1 / probability - 1)

The expert that is expected to be used last is evicted. The probability is a moving average over the
layer's own turns. A turn that needs most of the layer's experts, such as a prefill, says little
about which of them are popular, and changes the averages little. So neither a long prompt nor the
cycle through the layers, in which a plain LRU evicts what is needed next, empties the tier.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Key = tuple[int, int]  # layer, expert

MEMORY = 0.1  # weight of a layer's last turn in its averages
LEAST_LIKELY = 1e-6
QUEUE_SHARE = 32  # one place in this many is queued for eviction in one pass


@dataclass(frozen=True, slots=True)
class Taken:
    key: Key
    place: int
    is_new: bool  # the tier does not hold it yet: the caller must fill the place


class Residency:
    def __init__(self, num_places: int, num_layers: int, num_experts: int) -> None:
        assert num_places > 0
        self.num_places, self.num_layers, self.num_experts = num_places, num_layers, num_experts
        shape = (num_layers, num_experts)
        self._free = list(reversed(range(num_places)))
        self._place_of = np.full(shape, -1)
        self._layer_in = np.full(num_places, -1)  # -1: the place is free
        self._expert_in = np.zeros(num_places, int)
        self._is_pinned = np.zeros(num_places, bool)
        self._queue: list[int] = []  # places to evict, the next one at the end
        self._is_queued = np.zeros(num_places, bool)  # reset when the expert is used
        self._likely = np.zeros(shape)  # probability when the expert was last used
        self._fading = np.zeros(num_layers)  # log of the decay of averages since the start
        self._fading_at = np.zeros(shape)  # the layer's value when the expert was last used

    def __len__(self) -> int:
        return self.num_places - len(self._free)

    def __contains__(self, key: Key) -> bool:
        return bool(self._place_of[key] >= 0)

    def take(self, layer: int, experts: Sequence[int]) -> list[Taken]:
        """A place for each of these different experts. They keep it at least until `release`."""
        self._learn(layer, experts)
        places = self._place_of[layer, experts]
        held = places[places >= 0]
        self._is_pinned[held] = True  # before any is evicted for another
        self._is_queued[held] = False
        num_new = int((places < 0).sum())
        if num_new > len(self._free):
            self._evict(layer, num_new - len(self._free))
        taken = []
        for expert, place in zip(experts, places.tolist()):
            is_new = place < 0
            if is_new:
                place = self._free.pop()
                self._place_of[layer, expert] = place
                self._layer_in[place], self._expert_in[place] = layer, expert
                self._is_pinned[place] = True
            taken.append(Taken((layer, expert), place, is_new))
        return taken

    def release(self) -> None:
        """The experts that were taken may be evicted again."""
        self._is_pinned[:] = False

    def forget(self, key: Key) -> None:
        """Frees the place of an expert that could not be read."""
        self._vacate(int(self._place_of[key]))

    def heat(self) -> np.ndarray:  # [layers, experts] uint8
        """The probability of each expert at its layer's turn in 127ths, plus 128 if it has a
        place.
        """
        lost = self._fading[:, None] - self._fading_at
        likely = np.rint(127 * self._likely * np.exp(lost)).clip(0, 127).astype(np.uint8)
        return likely | (self._place_of >= 0).astype(np.uint8) << 7

    def _learn(self, layer: int, experts: Sequence[int]) -> None:
        weight = MEMORY * (1 - len(experts) / (self.num_experts + 1))
        self._fading[layer] += np.log1p(-weight)
        now = self._likelihood(layer, experts) + weight
        self._likely[layer, experts] = now
        self._fading_at[layer, experts] = self._fading[layer]

    def _likelihood(
        self, layers: np.ndarray | int, experts: np.ndarray | Sequence[int]
    ) -> np.ndarray:
        lost = self._fading[layers] - self._fading_at[layers, experts]
        likely: np.ndarray = self._likely[layers, experts] * np.exp(lost)
        return likely

    def _evict(self, layer: int, count: int) -> None:
        """At a layer's turn: evicts the experts that are expected to be used last."""
        while count:
            if not self._queue:
                self._fill_queue(layer, count)
            place = self._queue.pop()
            if self._is_queued[place]:
                self._vacate(place)
                count -= 1

    def _fill_queue(self, layer: int, count: int) -> None:
        turns = (self._layer_in - layer - 1) % self.num_layers + 1
        likely = np.maximum(self._likelihood(self._layer_in, self._expert_in), LEAST_LIKELY)
        expected = turns + self.num_layers * (1 / likely - 1)
        expected[self._is_pinned | (self._layer_in < 0)] = -np.inf
        num_free = int(np.count_nonzero(expected > -np.inf))
        assert num_free >= count, "fewer are pinned than places exist"
        length = min(max(count, self.num_places // QUEUE_SHARE), num_free)
        chosen = np.argpartition(-expected, length - 1)[:length]
        self._queue = chosen[np.argsort(expected[chosen])].tolist()
        self._is_queued[self._queue] = True

    def _vacate(self, place: int) -> None:
        self._place_of[self._layer_in[place], self._expert_in[place]] = -1
        self._layer_in[place] = -1
        self._is_pinned[place] = self._is_queued[place] = False
        self._free.append(place)
