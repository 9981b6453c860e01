"""Word problems about counted things: groups, shares, comparisons, crowds, pages, points.

Each scene is one function that writes its sentences, its solution and its question into a draft.
"""

from __future__ import annotations

from training.problems.arithmetic import add, add_three, divide, multiply, subtract
from training.problems.draft import Draft
from training.problems.draw import pick

TIMES = {2: "twice", 3: "three times", 4: "four times", 5: "five times", 6: "six times"}
PARTS = {2: "half", 3: "a third", 4: "a quarter", 5: "a fifth"}


def groups(d: Draft) -> None:
    k, n = d.number(2, 12), d.number(2, 40)
    d.say(
        (
            "{name} has {k} boxes of {things}. Each box holds {n} {things}.",
            "There are {k} shelves with {n} {things} on each.",
            "{name} fills {k} bags with {n} {things} each.",
            "A farmer packs {n} {things} into each of {k} crates.",
            "{k} children bring {n} {things} each to school.",
        ),
        k=k,
        n=n,
    )
    d.work(f"There are {multiply(k, n)} {d.unit[1]}.", k * n)
    if d.rng.random() < 0.5:
        d.ask(("How many {things} are there in all?", "How many {things} is that altogether?"))
        return
    gone = d.number(2, min(k * n, 60))
    d.say(
        ("{m} of them are sold.", "{m} {things} are given away.", "{m} of the {things} are bad."),
        m=gone,
    )
    d.ask(("How many {things} are left?", "How many {things} remain?"))
    d.work(f"Then {subtract(k * n, gone)} {d.name_unit(k * n - gone)} are left.", k * n - gone)


def two_groups(d: Draft) -> None:
    k, n, j, m = d.number(2, 9), d.number(2, 15), d.number(2, 9), d.number(2, 15)
    d.say(
        (
            "{name} buys {k} boxes of {n} {things} and {j} bags of {m} {things}.",
            "On one wall are {k} shelves with {n} {things} each, on the other {j} shelves with {m} each.",
            "{k} girls have {n} {things} each, and {j} boys have {m} {things} each.",
        ),
        k=k,
        n=n,
        j=j,
        m=m,
    )
    d.ask(("How many {things} are there in total?", "How many {things} is that together?"))
    d.work(f"The first are {multiply(k, n)} {d.unit[1]}.", k * n)
    d.work(f"The second are {multiply(j, m)} {d.unit[1]}.", j * m)
    d.work(f"Together there are {add(k * n, j * m)} {d.unit[1]}.", k * n + j * m)


def equal_shares(d: Draft) -> None:
    k, each = d.number(2, 12), d.number(2, 25)
    d.say(
        (
            "{name} shares {n} {things} equally among {k} friends.",
            "{n} {things} are put into {k} boxes, the same number into each.",
            "{k} families divide {n} {things} evenly.",
            "{name} plants {n} {things} in {k} equal rows.",
        ),
        n=k * each,
        k=k,
    )
    d.work(f"Each gets {divide(k * each, k)} {d.unit[1]}.", each)
    if d.rng.random() < 0.6:
        d.ask(("How many {things} is that for each?", "How many {things} does each one get?"))
        return
    more = d.number(2, 40)
    d.say(("Later each gets {m} more.", "Then {m} {things} are added to each."), m=more)
    d.ask(("How many {things} does each have now?", "How many {things} has each in the end?"))
    d.work(f"Now each has {add(each, more)} {d.unit[1]}.", each + more)


def how_many_groups(d: Draft) -> None:
    k, each = d.number(2, 12), d.number(2, 20)
    left_out = d.number(2, 20) if d.rng.random() < 0.4 else 0
    if left_out:
        d.say(
            ("{name} has {n} {things} and keeps {m} of them.", "Of {n} {things}, {m} are broken."),
            n=k * each + left_out,
            m=left_out,
        )
        d.work(f"That leaves {subtract(k * each + left_out, left_out)} {d.unit[1]}.", k * each)
        d.say(("The others go into boxes of {e}.", "The rest are packed in boxes of {e}."), e=each)
    else:
        d.say(
            (
                "{name} packs {n} {things} into boxes. Every box holds {e} {things}.",
                "{n} {things} have to be put into boxes of {e}.",
            ),
            n=k * each,
            e=each,
        )
    d.ask(("How many boxes are needed?", "How many boxes does that fill?"))
    d.work(f"That takes {divide(k * each, each)} boxes.", k)
    d.unit = ("box", "boxes")


def more_or_fewer(d: Draft) -> None:
    n, difference = d.number(5, 150), d.number(2, 60)
    is_more = d.rng.random() < 0.5 or difference >= n
    name, friend = d.words["name"], d.words["friend"]
    if is_more:
        d.say(
            (
                "{name} has {n} {things}. {friend} has {m} more {things} than {name}.",
                "{name} found {n} {things}, and {friend} found {m} more than that.",
            ),
            n=n,
            m=difference,
        )
        other = n + difference
        d.work(f"{friend} has {add(n, difference)} {d.unit[1]}.", other)
    else:
        d.say(
            (
                "{name} has {n} {things}. {friend} has {m} fewer {things} than {name}.",
                "{name} found {n} {things}, and {friend} found {m} fewer than that.",
            ),
            n=n,
            m=difference,
        )
        other = n - difference
        d.work(f"{friend} has {subtract(n, difference)} {d.name_unit(other)}.", other)
    if d.rng.random() < 0.45:
        d.ask(("How many {things} does {friend} have?", "How many {things} are {friend}'s?"))
        return
    d.ask(
        (
            "How many {things} do they have together?",
            "How many {things} do {name} and {friend} have in all?",
        )
    )
    d.work(f"{name} and {friend} have {add(n, other)} {d.unit[1]}.", n + other)


def times_as_many(d: Draft) -> None:
    n, k = d.number(2, 60), d.number(2, 6)
    friend = d.words["friend"]
    d.words["times"] = TIMES[k]
    d.say(
        (
            "{name} has {n} {things}. {friend} has {times} as many {things} as {name}.",
            "{friend} has {times} as many {things} as {name}, who has {n}.",
            "{name} collected {n} {things}. {friend} collected {times} as many.",
        ),
        n=n,
        k=k,
    )
    d.work(f"{friend} has {multiply(n, k)} {d.unit[1]}.", n * k)
    luck = d.rng.random()
    if luck < 0.35:
        d.ask(("How many {things} does {friend} have?",))
    elif luck < 0.75:
        d.ask(
            (
                "How many {things} do they have together?",
                "How many {things} do the two have in all?",
            )
        )
        d.work(f"Together they have {add(n, n * k)} {d.unit[1]}.", n + n * k)
    else:
        d.ask(("How many more {things} than {name} does {friend} have?",))
        d.work(f"{friend} has {subtract(n * k, n)} {d.name_unit(n * k - n)} more.", n * k - n)


def part_as_many(d: Draft) -> None:
    k, other = d.number(2, 5), d.number(2, 60)
    friend = d.words["friend"]
    d.words["part"] = PARTS[k]
    d.say(
        (
            "{name} has {n} {things}. {friend} has {part} as many {things}.",
            "{name} picks {n} {things}, and {friend} picks {part} as many.",
            "{friend} owns {part} as many {things} as {name}. {name} owns {n}.",
        ),
        n=k * other,
        k=k,
    )
    d.work(f"{friend} has {divide(k * other, k)} {d.unit[1]}.", other)
    if d.rng.random() < 0.4:
        d.ask(("How many {things} does {friend} have?",))
        return
    d.ask(("How many {things} do they have together?", "How many {things} is that in all?"))
    d.work(f"Together they have {add(k * other, other)} {d.unit[1]}.", k * other + other)


def part_of_all(d: Draft) -> None:
    k, part = d.number(2, 5), d.number(2, 60)
    total = k * part
    d.words["part"] = PARTS[k]
    d.say(
        (
            "{name} has {n} {things}, and {part} of them are red.",
            "Of {name}'s {n} {things}, {part} are new.",
            "A shop has {n} {things}. On Monday {part} of them are sold.",
        ),
        n=total,
        k=k,
    )
    d.work(f"That part is {divide(total, k)} {d.unit[1]}.", part)
    if d.rng.random() < 0.3:
        d.ask(("How many {things} is that part?", "How many {things} are meant?"))
        return
    d.ask(("How many of the {things} are the others?", "How many {things} are the rest?"))
    d.work(f"The rest are {subtract(total, part)} {d.unit[1]}.", total - part)


def three_people(d: Draft) -> None:
    a, b, c = d.number(2, 120), d.number(2, 120), d.number(2, 120)
    d.say(
        (
            "{name} has {a} {things}, {friend} has {b} and their teacher has {c}.",
            "In three rooms there are {a}, {b} and {c} {things}.",
            "{name} finds {a} {things} on Monday, {b} on Tuesday and {c} on Wednesday.",
            "A shop sells {a} {things} in the morning, {b} at noon and {c} in the evening.",
        ),
        a=a,
        b=b,
        c=c,
    )
    d.ask(("How many {things} is that in total?", "How many {things} are there altogether?"))
    d.work(f"In total there are {add_three(a, b, c)} {d.unit[1]}.", a + b + c)


def three_days(d: Draft) -> None:
    n, k = d.number(4, 40), d.number(2, 4)
    fewer = d.number(2, n - 1)
    d.words["times"] = TIMES[k]
    d.say(
        (
            "On Monday {name} sells {n} {things}. On Tuesday {he} sells {times} as many as on Monday, "
            "and on Wednesday {m} fewer than on Monday.",
            "{name} made {n} {things} in May, {times} as many in June, and in July {m} fewer than in May.",
        ),
        n=n,
        k=k,
        m=fewer,
    )
    d.ask(
        ("How many {things} is that in total?", "How many {things} is that in all three together?")
    )
    d.work(f"The second is {multiply(n, k)}.", n * k)
    d.work(f"The third is {subtract(n, fewer)}.", n - fewer)
    total = n + n * k + n - fewer
    d.work(f"In total that is {add_three(n, n * k, n - fewer)} {d.unit[1]}.", total)


def missing_part(d: Draft) -> None:
    part, rest = d.number(2, 300), d.number(2, 300)
    d.say(
        (
            "There are {n} {things} in a box. {m} of them are blue, and the others are green.",
            "{name} and {friend} have {n} {things}. {m} of them are {name}'s, the others are {friend}'s.",
            "A shop ordered {n} {things}, but only {m} have come; the others are still on the way.",
        ),
        n=part + rest,
        m=part,
    )
    d.ask(("How many {things} are the others?", "How many other {things} are there?"))
    d.work(f"The others are {subtract(part + rest, part)} {d.unit[1]}.", rest)


def bus(d: Draft) -> None:
    d.unit = ("person", "people")
    riders = d.number(5, 60)
    d.say(
        (
            "A bus leaves the station with {n} people.",
            "There are {n} people on a train.",
            "{n} people are in a museum in the morning.",
            "{name} counts {n} people on a boat.",
        ),
        n=riders,
    )
    for _ in range(pick(d.rng, (1, 1, 2))):
        leave, enter = d.number(2, min(riders, 25)), d.number(2, 40)
        d.say(
            (
                "Then {m} leave and {n} come in.",
                "{m} get off and {n} get on.",
                "{m} people go, {n} others come.",
            ),
            m=leave,
            n=enter,
        )
        d.work(f"After {leave} leave, {subtract(riders, leave)} are left.", riders - leave)
        d.work(f"With {enter} more there are {add(riders - leave, enter)}.", riders - leave + enter)
        riders = d.value
        if riders < 2:
            break
    d.ask(("How many people are there now?", "How many people are there in the end?"))


def school_class(d: Draft) -> None:
    d.unit = ("child", "children")
    k, size = d.number(2, 9), d.number(2, 12)
    total = k * size
    girls = d.number(1, total - 1)
    d.say(
        (
            "A class has {g} girls and {b} boys.",
            "{g} girls and {b} boys go on a trip with {name}'s school.",
            "In a sports club there are {b} boys and {g} girls.",
        ),
        g=girls,
        b=total - girls,
    )
    d.work(f"There are {add(girls, total - girls)} children.", total)
    if d.rng.random() < 0.25:
        d.ask(("How many children are there?", "How many children is that?"))
        return
    d.say(("They form {k} equal teams.", "They are split into {k} groups of the same size."), k=k)
    d.ask(("How many children are in one team?", "How many children are in each group?"))
    d.work(f"One group has {divide(total, k)} children.", size)


def legs(d: Draft) -> None:
    birds, cows = d.number(2, 30), d.number(2, 20)
    d.unit = ("leg", "legs")
    d.say(
        (
            "A farm has {n} chickens and {m} cows. A chicken has 2 legs and a cow has 4.",
            "{name} sees {n} ducks and {m} dogs. Ducks have 2 legs and dogs have 4 legs.",
            "There are {n} birds and {m} horses. Each bird has 2 legs, each horse 4.",
        ),
        n=birds,
        m=cows,
    )
    d.ask(("How many legs do they have in all?", "How many legs are there?"))
    d.work(f"The first have {multiply(birds, 2)} legs.", birds * 2)
    d.work(f"The second have {multiply(cows, 4)} legs.", cows * 4)
    d.work(f"In all there are {add(birds * 2, cows * 4)} legs.", birds * 2 + cows * 4)


def points(d: Draft) -> None:
    k, worth, extra = d.number(2, 15), d.number(2, 10), d.number(2, 50)
    d.unit = ("point", "points")
    d.say(
        (
            "In a game, {name} hits {k} targets for {n} points each and gets a bonus of {m} points.",
            "{name} answers {k} questions. Each is worth {n} points, and {he} gets {m} extra points.",
            "{name} scores {k} goals of {n} points each; {friend} adds {m} points for the same team.",
        ),
        k=k,
        n=worth,
        m=extra,
    )
    d.ask(("How many points is that?", "How many points are there in total?"))
    d.work(f"That gives {multiply(k, worth)} points.", k * worth)
    d.work(f"The total is {add(k * worth, extra)} points.", k * worth + extra)


def baking(d: Draft) -> None:
    k, each = d.number(2, 9), d.number(2, 12)
    stock = k * each + d.number(2, 40)
    d.say(
        (
            "One cake needs {n} {things}. {name} makes {k} cakes and had {m} {things} at first.",
            "{name} has {m} {things}. {He} makes {k} necklaces and uses {n} {things} for each.",
            "For one basket {name} takes {n} {things}. {He} fills {k} baskets out of {m} {things}.",
        ),
        n=each,
        k=k,
        m=stock,
    )
    d.ask(("How many {things} are left over?", "How many {things} remain?"))
    d.work(f"That takes {multiply(k, each)} {d.unit[1]}.", k * each)
    left = stock - k * each
    d.work(f"Then {subtract(stock, k * each)} {d.name_unit(left)} are left.", left)


def dozens(d: Draft) -> None:
    k = d.number(2, 12)
    used = d.number(2, 20)
    d.say(
        (
            "{name} buys {k} dozen {things} and uses {m} of them. A dozen is 12.",
            "There are {k} dozen {things} in a shop, and {m} are sold. One dozen means 12.",
        ),
        k=k,
        m=used,
    )
    d.ask(("How many {things} are left?",))
    d.work(f"There are {multiply(k, 12)} {d.unit[1]}.", k * 12)
    d.work(f"Then {subtract(k * 12, used)} {d.unit[1]} are left.", k * 12 - used)


def seats(d: Draft) -> None:
    rows, wide = d.number(3, 30), d.number(3, 9)
    taken = d.number(2, rows * wide - 1)
    d.unit = ("seat", "seats")
    d.say(
        (
            "A hall has {k} rows of {n} seats. {m} seats are taken.",
            "A cinema has {k} rows with {n} seats each, and {m} people are sitting.",
            "A plane has {k} rows of {n} seats, of which {m} are sold.",
        ),
        k=rows,
        n=wide,
        m=taken,
    )
    d.ask(("How many seats are free?", "How many empty seats are there?"))
    d.work(f"There are {multiply(rows, wide)} seats.", rows * wide)
    d.work(f"Free are {subtract(rows * wide, taken)} seats.", rows * wide - taken)


COUNT_SCENES = (
    groups, two_groups, equal_shares, how_many_groups, more_or_fewer, times_as_many, part_as_many,
    part_of_all, three_people, three_days, missing_part, bus, school_class, legs, points, baking, dozens,
    seats,
)  # fmt: skip
