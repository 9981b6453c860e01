"""The three calls: what they accept, what they refuse, and the slot of each request."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.forge.fragments.cache_pages import Cache
from penstock.forge.fragments.decode_split_kv import run_tokens
from penstock.forge.fragments.forward_kernels import Model, run_prompts
from penstock.forge.fragments.graphs_decode import DecodeGraphs
from penstock.forge.fragments.graphs_prefill import PrefillGraphs
from penstock.forge.fragments.kernel_rows import rope_table
from penstock.forge.fragments.shape import pick_dtype, read_shape
from penstock.forge.fragments.weights import load_weights

NUM_THREADS = 1  # forge: value
WARM_UP_TOKENS = 2048


class Request:
    def __init__(self, slot: int, length: int) -> None:
        self.slot = slot
        self.length = length


class Engine:
    """Requests by id. Every call is checked before it changes anything."""

    def __init__(self, model: Model, device: torch.device) -> None:
        self.model = model
        self.device = device
        self.requests: dict[Hashable, Request] = {}
        self.decode_steps = DecodeGraphs(model)  # forge: when graphs=decode|all
        self.prompt_passes = PrefillGraphs(model)  # forge: when graphs=all

    @torch.inference_mode()
    def prefill(self, request_ids: Sequence[Hashable], input_ids: Sequence[Tensor]) -> Tensor:
        """Runs whole prompts and returns the logits after each, [R, V]. A known id is replaced."""
        check_batch(request_ids, len(input_ids))
        tokens, lengths = self._check_prompts(request_ids, input_ids)
        cache = self.model.cache
        slots = cache.take_slots(len(lengths))
        try:
            cache.reserve(slots, lengths)  # forge: when cache=pages
            # forge: when graphs=none|decode
            logits = run_prompts(self.model, tokens, lengths, slots)
            # forge: end
            logits = self.prompt_passes.launch(tokens, lengths, slots)  # forge: when graphs=all
        except BaseException:  # memory may run out; replaced requests still have their old slot
            for slot in slots:
                cache.give_back(slot)
            raise
        for id, slot, length in zip(request_ids, slots, lengths):
            if id in self.requests:
                cache.give_back(self.requests[id].slot)
            self.requests[id] = Request(slot, length)
        return logits

    @torch.inference_mode()
    def decode(self, request_ids: Sequence[Hashable], token_ids: Tensor) -> Tensor:
        """Appends one token to each request and returns the logits after it, [R, V]."""
        tokens = torch.as_tensor(token_ids).flatten()
        check_batch(request_ids, len(tokens))
        requests = [self._known(id) for id in request_ids]
        for id, request in zip(request_ids, requests):
            self._check_length(id, request.length + 1)
        slots = [request.slot for request in requests]
        positions = [request.length for request in requests]
        # forge: when graphs=none
        check_range(tokens, self.model.shape.vocab_size)
        self.model.cache.reserve(slots, [at + 1 for at in positions])  # forge: when cache=pages
        logits = run_tokens(self.model, tokens.to(self.device, torch.int64), slots, positions)
        # forge: end
        # forge: when graphs!=none
        copied = CopiedTokens(tokens)
        if not tokens.is_cuda:
            check_bounds(*copied.bounds(), self.model.shape.vocab_size)
        self.model.cache.reserve(slots, [at + 1 for at in positions])  # forge: when cache=pages
        logits = self.decode_steps.launch(tokens, slots, positions)
        if tokens.is_cuda:  # while the step runs: it has no effect until lengths change
            check_bounds(*copied.bounds(), self.model.shape.vocab_size)
        # forge: end
        for request in requests:
            request.length += 1
        return logits

    def remove(self, request_ids: Sequence[Hashable]) -> None:
        check_batch(request_ids, len(request_ids))
        requests = [self._known(id) for id in request_ids]
        for id, request in zip(request_ids, requests):
            self.model.cache.give_back(request.slot)
            del self.requests[id]

    def _known(self, id: Hashable) -> Request:
        if id not in self.requests:
            raise KeyError(f"request {id!r} is not here; prefill it first")
        return self.requests[id]

    def _check_prompts(
        self, request_ids: Sequence[Hashable], input_ids: Sequence[Tensor]
    ) -> tuple[Tensor, list[int]]:
        """All tokens end to end on the device, and the length of each prompt."""
        prompts = [torch.as_tensor(prompt) for prompt in input_ids]
        for id, prompt in zip(request_ids, prompts):
            if prompt.ndim != 1 or len(prompt) == 0:
                raise ValueError(
                    f"the prompt of {id!r} has shape {list(prompt.shape)}; one row is expected"
                )
            self._check_length(id, len(prompt))
        tokens = torch.cat([prompt.to(prompts[0].device) for prompt in prompts])
        check_range(tokens, self.model.shape.vocab_size)
        return tokens.to(self.device, torch.int64), [len(prompt) for prompt in prompts]

    def _check_length(self, id: Hashable, length: int) -> None:
        if length > self.model.shape.max_len:
            raise ValueError(
                f"request {id!r} would have {length} tokens; the model holds "
                f"{self.model.shape.max_len}"
            )


class CopiedTokens:
    """Tokens being copied from the device: waiting for them waits for all work before the step."""

    def __init__(self, tokens: Tensor) -> None:
        check_type(tokens)
        self.tokens = tokens
        self.arrived: torch.cuda.Event | None = None
        if tokens.is_cuda:
            self.tokens = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
            self.tokens.copy_(tokens, non_blocking=True)
            self.arrived = torch.cuda.Event()
            self.arrived.record()

    def bounds(self) -> tuple[int, int]:
        if self.arrived is not None:
            self.arrived.synchronize()
        tokens = self.tokens.tolist()
        return min(tokens), max(tokens)


def check_batch(request_ids: Sequence[Hashable], num_inputs: int) -> None:
    if len(request_ids) == 0:
        raise ValueError("the batch is empty; give at least one request id")
    if len(set(request_ids)) != len(request_ids):
        raise ValueError(f"a request id stands twice in {list(request_ids)}")
    if len(request_ids) != num_inputs:
        raise ValueError(f"{len(request_ids)} request ids came with {num_inputs} inputs")


def check_range(tokens: Tensor, vocab_size: int) -> None:
    check_type(tokens)
    smallest, largest = torch.stack(tokens.aminmax()).tolist()
    check_bounds(smallest, largest, vocab_size)


def check_type(tokens: Tensor) -> None:
    if tokens.is_floating_point():
        raise TypeError(f"token ids are integers, not {tokens.dtype}")


def check_bounds(smallest: int, largest: int, vocab_size: int) -> None:
    if smallest < 0 or largest >= vocab_size:
        raise ValueError(
            f"token ids reach from {smallest} to {largest}; the vocabulary has {vocab_size}"
        )


def create_engine(model_config: dict[str, Any], weight_dir: str, device: str = "cuda") -> Engine:
    """An engine for the model with this config and model.pt."""
    torch.set_num_threads(NUM_THREADS)  # forge: when threads!=found
    place = torch.device(device)
    # forge: when layers=kernels
    if place.type == "cuda" and place.index not in (None, torch.cuda.current_device()):
        raise ValueError(
            f"kernels start on cuda:{torch.cuda.current_device()}; make {device} current first"
        )
    # forge: end
    shape, dtype = read_shape(model_config), pick_dtype(model_config, place)
    with torch.inference_mode():
        weights = load_weights(shape, weight_dir, dtype, place)
        model = Model(shape, weights, Cache(shape, dtype, place), rope_table(shape, place))
        return Engine(model, place)  # forge: when graphs=none
        return warm_up(Engine(model, place))  # forge: when graphs!=none


def warm_up(engine: Engine) -> Engine:
    """Runs one request, with tokens from the CPU and the device, so that everything is loaded
    before the first call. Captures have freed the memory for passes that have no graph.
    """
    engine.decode_steps.run_large_pass()
    length = min(WARM_UP_TOKENS, engine.model.shape.max_len - 1)
    for place in {torch.device("cpu"), engine.device}:
        prompt = torch.zeros(length, dtype=torch.int64, device=place)
        engine.prefill(["warm-up"], [prompt])
        engine.decode(["warm-up"], prompt[:1])
        engine.remove(["warm-up"])
    return engine
