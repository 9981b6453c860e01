"""Tools generated from verbs, nouns and parameters, so that the model must read their schemas."""

from __future__ import annotations

from random import Random

from training.problems.draft import with_article
from training.problems.draw import between, pick
from training.problems.names import CITIES, COLOURS, invented_word, words
from training.problems.tool import (
    Parameter,
    Request,
    Tool,
    choice,
    clock_time,
    code,
    date,
    decimal,
    first_name,
    function_schema,
    integer,
    switch,
    text,
    whole,
)

VERBS = words(
    """
    check start stop open update count rename move copy paint clean inspect load archive register
    print scan measure rotate approve reset pack label store weigh mark repair export import publish
    test sort lift
    """
)

NOUNS = words(
    """
    valve pump crate sensor door shelf robot drone turbine tank gate lamp record invoice badge cable
    engine boat wagon tower panel bridge field hive oven mixer printer locker screen antenna meter
    channel bottle kiln loom battery module node folder account license camera
    """
)

PARAMETERS: dict[str, Parameter] = {
    "id": text(code),
    "name": text(invented_word),
    "owner": text(first_name),
    "level": whole(1, 99),
    "count": whole(2, 500),
    "speed": decimal(1, 90),
    "weight": decimal(1, 90),
    "site": text(lambda rng: pick(rng, CITIES)),
    "colour": text(lambda rng: pick(rng, COLOURS)),
    "date": text(date),
    "time": text(clock_time),
    "mode": choice("fast", "slow", "normal"),
    "size": choice("small", "medium", "large"),
    "quiet": switch(),
    "dry_run": switch(),
    "code": text(code),
    "target": text(invented_word),
    "seconds": whole(1, 900),
    "key": text(code),
    "zone": whole(1, 40),
}
_LABELS = tuple(PARAMETERS)

OPENINGS = (
    "Please {verb} the {noun}",
    "{Verb} the {noun}",
    "I want you to {verb} the {noun}",
    "Can you {verb} {a_noun}",
    "Use {name}",
    "Call {name}",
)
RETURNS = {"status": lambda rng: pick(rng, ("ok", "done", "queued")), "number": integer(1, 9999)}


def invent_tool(rng: Random) -> Tool:
    """A tool with one to three parameters, and one request pattern that names all of them."""
    verb, noun = pick(rng, VERBS), pick(rng, NOUNS)
    name = f"{verb}_{noun}"
    labels = list(dict.fromkeys(pick(rng, _LABELS) for _ in range(between(rng, 1, 3))))
    parameters = {label: PARAMETERS[label] for label in labels}
    said = {"verb": verb, "Verb": verb.capitalize(), "noun": noun, "a_noun": with_article(noun)}
    opening = pick(rng, OPENINGS).format(**said, name=name)
    listed = [f"{label.replace('_', ' ')} {{{label}}}" for label in labels]
    given = listed[0] if len(listed) == 1 else f"{', '.join(listed[:-1])} and {listed[-1]}"
    return Tool(
        name,
        function_schema(name, "{Verb} {a_noun}.".format(**said), parameters),
        parameters,
        (
            Request(
                f"{opening} with {given}{'?' if opening.startswith('Can') else '.'}",
                tuple(labels),
                {},
            ),
        ),
        RETURNS,
        f"The {noun} is {{status}}, number {{number}}.",
    )
