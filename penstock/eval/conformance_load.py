"""Checks with many clients: each gets a place, and a client that leaves gives its place back."""

from __future__ import annotations

import time

from penstock.eval.probe import QUESTION, CheckFailed, Probe, expect, read_reply, show

NUM_AT_ONCE = 64
NUM_COMPARED = 3
NUM_LEAVING = 128  # more than places, so that a place which is not given back is noticed
LEAVE_AFTER_S = 1.0
LONG_REPLY = 4096
TIMED_TOKENS = 16


def many_at_once(probe: Probe) -> str:
    """All are answered, and none with another's answer: a few are asked alone first."""
    questions = [
        f"What is {11 + number} + {number % 7 + 2}? Reply with just the number."
        for number in range(NUM_AT_ONCE)
    ]
    alone = [probe.ask(question, max_tokens=16).content for question in questions[:NUM_COMPARED]]
    start_s = time.monotonic()
    answers = probe.send(*(probe.body(question, max_tokens=16) for question in questions))
    wall_s = time.monotonic() - start_s
    texts, faults = [], []
    for answer in answers:
        try:
            texts.append(read_reply(answer).content)
        except CheckFailed as failure:
            faults.append(str(failure))
    if faults:
        raise CheckFailed(
            f"{len(faults)} of {NUM_AT_ONCE} requests at once failed; the first {faults[0]}"
        )
    mixed_up = [(one, other) for one, other in zip(alone, texts) if one != other]
    if mixed_up:
        expect(
            len(mixed_up) < 2,  # one may be a near tie that another batch size rounds the other way
            f"{show(mixed_up[0][1])} among {NUM_AT_ONCE} requests at once",
            f"{show(mixed_up[0][0])}, as when asked alone",
        )
    return f"{NUM_AT_ONCE} requests at once were answered in {wall_s:.2f} s"


def leaving_frees_the_place(probe: Probe) -> str:
    """Clients request long replies and disconnect; soon a new client must be served as fast as by
    an idle server."""
    idle_s = min(_seconds_of_a_reply(probe) for _ in range(3))
    longest = min(LONG_REPLY, (probe.max_model_len or LONG_REPLY) // 2)
    (tried,) = probe.send(probe.body(QUESTION, max_tokens=1, ignore_eos=True))
    goes_on = True if tried.status == 200 else None  # not every server can ignore an end token
    body = probe.body(QUESTION, max_tokens=longest, ignore_eos=goes_on, stream=True)
    left = probe.send(*[body] * NUM_LEAVING, timeout_s=LEAVE_AFTER_S)
    for status in {answer.status for answer in left}:
        expect(status in (0, 200, 429, 503), f"HTTP {status} for a stream", "200, or 429 when full")
    deadline_s = time.monotonic() + _patience_s([len(answer.pieces) for answer in left], longest)
    enough_s = max(2 * idle_s, idle_s + 0.25)
    took_s = _seconds_of_a_reply(probe)
    while took_s > enough_s and time.monotonic() < deadline_s:
        time.sleep(0.1)
        took_s = _seconds_of_a_reply(probe)
    expect(
        took_s <= enough_s,
        f"{took_s:.2f} s for a short reply after {NUM_LEAVING} clients disconnected",
        f"about {idle_s:.2f} s as before: their places are not given back",
    )
    return (
        f"after {NUM_LEAVING} clients disconnected, a reply took {took_s:.2f} s, {idle_s:.2f} "
        "s "
        "before"
    )


def _seconds_of_a_reply(probe: Probe) -> float:
    start_s = time.monotonic()
    probe.ask(QUESTION, max_tokens=TIMED_TOKENS)
    return time.monotonic() - start_s


def _patience_s(pieces: list[int], longest: int) -> float:
    """Less than the abandoned replies would take by themselves, or the wait would prove nothing."""
    rate = max(1.0, sum(pieces) / max(1, sum(count > 0 for count in pieces)) / LEAVE_AFTER_S)
    return min(10.0, max(1.0, longest / rate / 2))
