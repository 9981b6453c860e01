"""Sequences of calls that engines are tested with: drawn from a seed, as data, without tensors.

A trace tells for every call whether it must be answered or refused; `oracle` knows the right
logits. A correct engine plays all of them. They do not imitate real use.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

from penstock.forge.fragments.shape import Shape

ODD_LENGTHS = (1, 2, 3, 15, 16, 17, 31, 33, 63, 64, 65, 100, 127, 129, 200, 255, 257, 300)


@dataclass(frozen=True, slots=True)
class Call:
    kind: str  # "prefill", "decode" or "remove"
    ids: tuple[str, ...]
    tokens: tuple[tuple[int, ...], ...] = ()  # prompts, or one token each
    is_refused: bool = False  # a correct engine raises, and changes nothing

    @property
    def num_tokens(self) -> int:
        return sum(len(tokens) for tokens in self.tokens)


@dataclass(slots=True)
class Trace:
    """The calls so far, and the tokens of every request."""

    name: str
    shape: Shape
    rng: random.Random
    calls: list[Call] = field(default_factory=list)
    alive: dict[str, list[int]] = field(default_factory=dict)

    def draw_tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self.rng.randrange(self.shape.vocab_size) for _ in range(count))

    def prefill(self, lengths: dict[str, int]) -> None:
        self.prefill_tokens({id: self.draw_tokens(length) for id, length in lengths.items()})

    def prefill_tokens(self, prompts: dict[str, tuple[int, ...]]) -> None:
        self.calls.append(Call("prefill", tuple(prompts), tuple(prompts.values())))
        self.alive |= {id: list(prompt) for id, prompt in prompts.items()}

    def decode(self, ids: list[str], steps: int = 1) -> None:
        for _ in range(steps):
            tokens = tuple(self.draw_tokens(1) for _ in ids)
            self.calls.append(Call("decode", tuple(ids), tokens))
            for id, (token,) in zip(ids, tokens):
                self.alive[id].append(token)

    def remove(self, ids: list[str]) -> None:
        self.calls.append(Call("remove", tuple(ids)))
        for id in ids:
            del self.alive[id]

    def refuse(
        self, kind: str, ids: tuple[str, ...], tokens: tuple[tuple[int, ...], ...] = ()
    ) -> None:
        self.calls.append(Call(kind, ids, tokens, is_refused=True))

    def redrawn(self) -> Trace:
        """The same calls with other tokens."""
        calls = [
            replace(call, tokens=tuple(self.draw_tokens(len(tokens)) for tokens in call.tokens))
            for call in self.calls
        ]
        return Trace(self.name, self.shape, self.rng, calls)

    def end(self) -> Trace:
        """Removes the remaining requests, so that the next trace finds an empty engine."""
        if self.alive:
            self.remove(sorted(self.alive))
        return self


def correctness_traces(
    shape: Shape, seed: int, *, num_random: int, max_batch: int, crowd: int = 0
) -> list[Trace]:
    """One trace per situation, some random ones and, with `crowd`, one of that many short prompts:
    more rows than a captured step has.
    """
    rng = random.Random(seed)

    def new(name: str) -> Trace:
        return Trace(name, shape, rng)

    traces = [
        _single(new("single")),
        _batched(new("batched")),
        _inserted(new("inserted in between")),
        _removed(new("removed, re-added, replaced")),
        _twins(new("duplicate prompts")),
        _refusals(new("refusals")),
        _longest(new("up to the longest length")),
        _wide(new(f"{max_batch} at once"), max_batch),
    ]
    traces += [_random(new(f"chance {number}"), max_batch) for number in range(num_random)]
    return traces + ([_wide(new(f"a crowd of {crowd}"), crowd, longest=3)] if crowd else [])


def _lengths(trace: Trace, count: int, most: int) -> list[int]:
    most = min(most, trace.shape.max_len - 8)
    return [min(trace.rng.choice(ODD_LENGTHS), most) for _ in range(count)]


def _single(trace: Trace) -> Trace:
    for id, length in zip(("a", "b", "c"), (1, *_lengths(trace, 2, 300))):
        trace.prefill({id: length})
        trace.decode([id], steps=3)
    return trace.end()


def _batched(trace: Trace) -> Trace:
    trace.prefill(dict(zip("abcde", _lengths(trace, 5, 200))))
    trace.decode(list("abcde"), steps=2)
    trace.decode(list("dbeac"), steps=2)
    trace.decode(["c", "a"])
    trace.decode(["e"])
    return trace.end()


def _inserted(trace: Trace) -> Trace:
    trace.prefill(dict(zip("ab", _lengths(trace, 2, 100))))
    trace.decode(["a", "b"])
    trace.prefill(dict(zip("cd", _lengths(trace, 2, 100))))
    trace.decode(["c", "a", "d", "b"], steps=2)
    return trace.end()


def _removed(trace: Trace) -> Trace:
    lengths = [20 + length for length in _lengths(trace, 3, trace.shape.max_len - 40)]
    trace.prefill(dict(zip("abc", lengths)))
    trace.decode(["a", "b", "c"])
    trace.remove(["b"])
    trace.decode(["c", "a"])
    trace.prefill({"b": _lengths(trace, 1, 130)[0]})
    trace.decode(["a", "b", "c"])
    # One is replaced by a shorter prompt, one by a longer.
    trace.prefill({"d": _lengths(trace, 1, 130)[0], "a": 3, "b": lengths[1] + 4})
    trace.decode(["a", "d", "c", "b"], steps=2)
    return trace.end()


def _twins(trace: Trace) -> Trace:
    prompt = trace.draw_tokens(_lengths(trace, 1, 70)[0])
    trace.prefill_tokens({"a": prompt, "b": prompt, "c": prompt[: len(prompt) // 2 + 1]})
    trace.decode(["b", "c", "a"], steps=2)
    trace.prefill_tokens({"b": prompt})
    trace.decode(["a", "b"])
    return trace.end()


def _refusals(trace: Trace) -> Trace:
    """Every faulty call; after each, the engine must continue as if it had not been called."""
    vocab, longest = trace.shape.vocab_size, trace.shape.max_len
    trace.prefill({"a": 5, "b": 9})
    faults: list[tuple[str, tuple[str, ...], tuple[tuple[int, ...], ...]]] = [
        ("decode", ("nobody",), ((1,),)),
        ("remove", ("nobody",), ()),
        ("remove", ("a", "nobody"), ()),
        ("decode", ("a", "b"), ((1,), (vocab,))),
        ("decode", ("b", "a"), ((-1,), (1,))),
        ("prefill", ("a",), ((1, vocab + 3),)),
        ("prefill", ("c",), (tuple([1] * (longest + 1)),)),
        ("prefill", ("a",), ((),)),
        ("prefill", (), ()),
        ("decode", (), ()),
        ("decode", ("a", "a"), ((1,), (2,))),
        ("prefill", ("a", "c"), ((1, 2),)),
    ]
    for kind, ids, tokens in faults:
        trace.refuse(kind, ids, tokens)
    trace.decode(["b", "a"])
    return trace.end()


def _longest(trace: Trace) -> Trace:
    longest = trace.shape.max_len
    trace.prefill({"a": longest - 2, "b": longest})
    trace.decode(["a"], steps=2)
    trace.refuse("decode", ("a",), ((1,),))
    trace.refuse("decode", ("b",), ((1,),))
    return trace.end()


def _wide(trace: Trace, batch: int, longest: int = 40) -> Trace:
    ids = [f"r{number}" for number in range(batch)]
    trace.prefill(dict(zip(ids, _lengths(trace, batch, longest))))
    trace.rng.shuffle(ids)
    trace.decode(ids)
    trace.decode(ids[: batch // 2 + 1])
    return trace.end()


def _random(trace: Trace, max_batch: int) -> Trace:
    rng, names = trace.rng, [f"r{number}" for number in range(max(2, max_batch // 2))]
    for _ in range(16):
        chance = rng.random()
        growing = [id for id in trace.alive if len(trace.alive[id]) + 2 <= trace.shape.max_len]
        if chance < 0.35 or not growing:
            ids = rng.sample(names, rng.randint(1, min(4, len(names))))
            trace.prefill(dict(zip(ids, _lengths(trace, len(ids), 160))))
        elif chance < 0.85:
            trace.decode(rng.sample(growing, rng.randint(1, len(growing))), steps=rng.randint(1, 2))
        else:
            trace.remove(rng.sample(sorted(trace.alive), rng.randint(1, len(trace.alive))))
    return trace.end()
