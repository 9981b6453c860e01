"""Word problems about measured amounts: money, hours, distances, ages, pages, weights, areas.

Each scene is one function that writes its sentences, its solution and its question into a draft.
"""

from __future__ import annotations

from training.problems.arithmetic import add, add_three, divide, multiply, subtract
from training.problems.draft import Draft
from training.problems.draw import pick

DOLLARS = ("dollar", "dollars")
YEARS = ("year", "years")
TIMES = {2: "twice", 3: "three times", 4: "four times", 5: "five times"}


def buy(d: Draft) -> None:
    k, price = d.number(2, 12), d.number(2, 40)
    d.unit = DOLLARS
    d.say(
        (
            "{name} buys {k} {things} for ${n} each.",
            "One {thing} costs ${n}. {name} buys {k}.",
            "A shop sells {things} at {n} dollars each, and {name} takes {k} of them.",
        ),
        k=k,
        n=price,
    )
    d.work(f"The cost is {multiply(k, price)} dollars.", k * price)
    luck = d.rng.random()
    if luck < 0.35:
        d.ask(
            (
                "How much does {name} pay?",
                "How many dollars does {he} spend?",
                "What is the total price?",
            )
        )
    elif luck < 0.7:
        paid = next(bill for bill in (20, 50, 100, 200, 500, 1000) if bill > k * price)
        d.say(("{He} pays with ${m}.", "{name} gives the cashier {m} dollars."), m=paid)
        d.ask(("How much change does {he} get?", "How many dollars does {he} get back?"))
        d.work(f"The change is {subtract(paid, k * price)} dollars.", paid - k * price)
    else:
        off = d.number(2, min(20, k * price - 1))
        d.say(
            ("{He} has a coupon for ${m} off.", "The shop takes {m} dollars off the total."), m=off
        )
        d.ask(("How much does {name} pay?", "How many dollars does {he} have to pay?"))
        d.work(f"With the discount it is {subtract(k * price, off)} dollars.", k * price - off)


def buy_two_sorts(d: Draft) -> None:
    k, p, j, q = d.number(2, 9), d.number(2, 15), d.number(2, 9), d.number(2, 15)
    d.unit = DOLLARS
    d.say(
        (
            "{name} buys {k} {things} at ${p} each and {j} {others} at ${q} each.",
            "{A_thing} costs ${p} and {a_other} costs ${q}. {name} buys {k} {things} and {j} {others}.",
            "{name} sells {k} {things} for {p} dollars each and {j} {others} for {q} dollars each.",
        ),
        k=k,
        p=p,
        j=j,
        q=q,
    )
    d.ask(("How many dollars is that in total?", "How much money is that altogether?"))
    d.work(f"The {d.words['things']} make {multiply(k, p)} dollars.", k * p)
    d.work(f"The {d.words['others']} make {multiply(j, q)} dollars.", j * q)
    d.work(f"The total is {add(k * p, j * q)} dollars.", k * p + j * q)


def tickets(d: Draft) -> None:
    adults, children = d.number(2, 9), d.number(2, 9)
    full = d.number(4, 15)
    reduced = full - d.number(2, full - 2)
    d.unit = DOLLARS
    d.say(
        (
            "A ticket is ${p} for adults and ${q} for children. {k} adults and {j} children go to the zoo.",
            "{k} adults and {j} children visit a pool. Adults pay {p} dollars, children pay {q} dollars.",
        ),
        p=full,
        q=reduced,
        k=adults,
        j=children,
    )
    d.ask(("How much do they pay together?", "What do all the tickets cost in dollars?"))
    d.work(f"The adults pay {multiply(adults, full)} dollars.", adults * full)
    d.work(f"The children pay {multiply(children, reduced)} dollars.", children * reduced)
    total = adults * full + children * reduced
    d.work(f"Together they pay {add(adults * full, children * reduced)} dollars.", total)


def wages(d: Draft) -> None:
    rate, hours = d.number(6, 25), d.number(2, 9)
    d.unit = DOLLARS
    d.say(
        (
            "{name} earns ${n} an hour and works {k} hours.",
            "For one hour of work {name} gets {n} dollars. {He} works {k} hours.",
            "{name} teaches music for ${n} an hour, today for {k} hours.",
        ),
        n=rate,
        k=hours,
    )
    earned = rate * hours
    d.work(f"{d.words['name']} earns {multiply(rate, hours)} dollars.", earned)
    luck = d.rng.random()
    if luck < 0.3:
        d.ask(("How much does {he} earn?", "How many dollars does {name} get?"))
    elif luck < 0.65:
        spent = d.number(2, earned - 1)
        d.say(
            ("{He} spends ${m} on food.", "Of that, {he} pays {m} dollars for {a_other}."), m=spent
        )
        d.ask(("How much is left?", "How many dollars does {he} have left?"))
        d.work(f"Left are {subtract(earned, spent)} dollars.", earned - spent)
    else:
        had = d.number(5, 200)
        d.say(("{He} already had ${m}.", "Before that {he} had saved {m} dollars."), m=had)
        d.ask(("How much does {he} have now?", "How many dollars does {name} have now?"))
        d.work(f"Now {d.words['he']} has {add(had, earned)} dollars.", had + earned)


def save_up(d: Draft) -> None:
    weeks, weekly = d.number(2, 12), d.number(2, 15)
    had = d.number(2, 40) if d.rng.random() < 0.5 else 0
    price = weeks * weekly + had
    if had:
        d.say(
            (
                "{name} wants {a_other} for ${p}. {He} has ${m} and saves ${n} every week.",
                "{A_other} costs {p} dollars. {name} has {m} dollars and puts aside {n} dollars a week.",
            ),
            p=price,
            m=had,
            n=weekly,
        )
        d.work(f"{d.words['name']} still needs {subtract(price, had)} dollars.", price - had)
    else:
        d.say(
            (
                "{name} saves ${n} every week for {a_other} that costs ${p}.",
                "{A_other} costs {p} dollars, and {name} puts aside {n} dollars a week.",
            ),
            p=price,
            n=weekly,
        )
    d.ask(("After how many weeks can {he} buy it?", "How many weeks does that take?"))
    d.work(f"That takes {divide(weeks * weekly, weekly)} weeks.", weeks)
    d.unit = ("week", "weeks")


def discount(d: Draft) -> None:
    percent = pick(d.rng, (10, 20, 25, 50))
    price = d.number(1, 20) * (100 // percent) * (1 if percent != 50 else 2)
    off = price * percent // 100
    d.unit = DOLLARS
    d.say(
        (
            "{A_thing} costs ${n}. In the sale it is {m}% cheaper.",
            "{name} wants {a_thing} for {n} dollars and gets {m} percent off.",
        ),
        n=price,
        m=percent,
    )
    d.ask(("What does it cost now?", "How many dollars does {name} pay for it?"))
    d.work(f"{percent}% of {price} is {divide(price, 100 // percent)}.", off)
    d.work(f"The new price is {subtract(price, off)} dollars.", price - off)


def ages(d: Draft) -> None:
    young, gap = d.number(3, 40), d.number(2, 30)
    name, friend = d.words["name"], d.words["friend"]
    d.unit = YEARS
    if d.rng.random() < 0.5:
        d.say(
            (
                "{name} is {n} years old. {friend} is {m} years older.",
                "{friend} is {m} years older than {name}, who is {n}.",
            ),
            n=young,
            m=gap,
        )
        d.work(f"{friend} is {add(young, gap)} years old.", young + gap)
    else:
        k = d.number(2, 5)
        d.words["times"] = TIMES[k]
        d.say(
            (
                "{name} is {n} years old, and {friend} is {times} as old.",
                "{friend} is {times} as old as {name}. {name} is {n}.",
            ),
            n=young,
            k=k,
        )
        d.work(f"{friend} is {multiply(young, k)} years old.", young * k)
    old, luck = d.value, d.rng.random()
    if luck < 0.3:
        d.ask(("How old is {friend}?",))
    elif luck < 0.65:
        d.ask(("How old are they together?", "What is the sum of their ages?"))
        d.work(f"{name} and {friend} are {add(young, old)} years together.", young + old)
    else:
        later = d.number(2, 20)
        d.ask(
            (
                "How old will {friend} be in {j} years?",
                "What will be {friend}'s age {j} years from now?",
            ),
            j=later,
        )
        d.work(f"In {later} years {friend} will be {add(old, later)}.", old + later)


def travel(d: Draft) -> None:
    speed, hours = d.number(3, 99), d.number(2, 9)
    d.unit = ("kilometer", "kilometers")
    d.say(
        (
            "{name} drives {k} hours at {n} kilometers per hour.",
            "A train goes {n} kilometers every hour and travels for {k} hours.",
            "A ship makes {n} kilometers an hour. It sails for {k} hours.",
        ),
        k=hours,
        n=speed,
    )
    way = speed * hours
    d.work(f"That is {multiply(speed, hours)} kilometers.", way)
    if d.rng.random() < 0.5:
        d.ask(("How many kilometers is that?", "How far is that in kilometers?"))
        return
    whole = way + d.number(2, 90)
    d.say(
        ("The whole way is {m} kilometers.", "The goal is {m} kilometers from the start."), m=whole
    )
    d.ask(("How many kilometers are still to go?", "How far is it still?"))
    d.work(f"Still to go are {subtract(whole, way)} kilometers.", whole - way)


def speed_of(d: Draft) -> None:
    speed, hours = d.number(3, 60), d.number(2, 9)
    d.say(
        (
            "{name} rides {n} kilometers in {k} hours, always at the same speed.",
            "A car needs {k} hours for {n} kilometers.",
        ),
        n=speed * hours,
        k=hours,
    )
    d.ask(
        ("How many kilometers is that per hour?", "How many kilometers does that make in one hour?")
    )
    d.work(f"In one hour it is {divide(speed * hours, hours)} kilometers.", speed)
    d.unit = ("kilometer", "kilometers")


def round_trips(d: Draft) -> None:
    way, days = d.number(2, 12), d.number(2, 7)
    d.unit = ("kilometer", "kilometers")
    d.say(
        (
            "{name} lives {n} kilometers from school. {He} walks there and back on {k} days.",
            "The lake is {n} kilometers away. {name} cycles there and back {k} times.",
        ),
        n=way,
        k=days,
    )
    d.ask(("How many kilometers is that in all?", "How far does {he} go in total?"))
    d.work(f"There and back is {multiply(way, 2)} kilometers.", way * 2)
    d.work(f"In all that is {multiply(way * 2, days)} kilometers.", way * 2 * days)


def reading(d: Draft) -> None:
    pages, days = d.number(3, 40), d.number(2, 9)
    done = pages * days
    whole = done + d.number(2, 150)
    d.unit = ("page", "pages")
    d.say(
        (
            "{name} reads {n} pages a day of a book with {m} pages. {He} has read for {k} days.",
            "A book has {m} pages. For {k} days {name} reads {n} pages each day.",
        ),
        n=pages,
        m=whole,
        k=days,
    )
    d.ask(("How many pages are left?", "How many pages does {he} still have to read?"))
    d.work(f"{d.words['name']} has read {multiply(pages, days)} pages.", done)
    d.work(f"Left are {subtract(whole, done)} pages.", whole - done)


def minutes(d: Draft) -> None:
    k, each, pause = d.number(2, 12), d.number(3, 20), d.number(2, 45)
    d.unit = ("minute", "minutes")
    d.say(
        (
            "{name} needs {n} minutes for one {thing}. {He} makes {k} and rests {m} minutes.",
            "One song lasts {n} minutes. {name} hears {k} songs and then talks for {m} minutes.",
            "{name} solves {k} puzzles in {n} minutes each and reads for {m} minutes.",
        ),
        n=each,
        k=k,
        m=pause,
    )
    d.ask(("How many minutes is that?", "How many minutes does that take in all?"))
    d.work(f"That takes {multiply(k, each)} minutes.", k * each)
    d.work(f"With the rest it is {add(k * each, pause)} minutes.", k * each + pause)


def hours_to_minutes(d: Draft) -> None:
    hours, more = d.number(2, 9), d.number(2, 59)
    d.unit = ("minute", "minutes")
    d.say(
        ("A film lasts {k} hours and {m} minutes.", "{name} sleeps for {k} hours and {m} minutes."),
        k=hours,
        m=more,
    )
    d.ask(("How many minutes is that?", "How long is that in minutes?"))
    d.work(f"{hours} hours are {multiply(hours, 60)} minutes.", hours * 60)
    d.work(f"That makes {add(hours * 60, more)} minutes.", hours * 60 + more)


def machine(d: Draft) -> None:
    rate, time = d.number(2, 60), d.number(2, 9)
    faulty = d.number(2, rate * time - 1)
    d.say(
        (
            "A machine makes {n} {things} per minute. In {k} minutes, {m} of them are faulty.",
            "{name}'s factory makes {n} {things} an hour. After {k} hours, {m} of the {things} do not work.",
        ),
        n=rate,
        k=time,
        m=faulty,
    )
    d.ask(("How many good {things} are there?", "How many {things} are fine?"))
    d.work(f"The machine makes {multiply(rate, time)} {d.unit[1]}.", rate * time)
    good = rate * time - faulty
    d.work(f"Good are {subtract(rate * time, faulty)} {d.name_unit(good)}.", good)


def weights(d: Draft) -> None:
    k, each, box = d.number(2, 9), d.number(2, 40), d.number(2, 50)
    d.unit = ("kilogram", "kilograms")
    d.say(
        (
            "A cart weighs {m} kilograms. {name} loads {k} bags of {n} kilograms each.",
            "{k} sacks weigh {n} kilograms each, and the box around them weighs {m} kilograms.",
        ),
        m=box,
        k=k,
        n=each,
    )
    d.ask(("How many kilograms is that together?", "What does everything weigh in kilograms?"))
    d.work(f"The bags weigh {multiply(k, each)} kilograms.", k * each)
    d.work(f"Together it is {add(k * each, box)} kilograms.", k * each + box)


def garden(d: Draft) -> None:
    long, wide = d.number(3, 40), d.number(2, 9)
    d.say(
        (
            "{name}'s garden is {n} meters long and {m} meters wide.",
            "A room is {m} meters wide and {n} meters long.",
            "A field has a length of {n} meters and a width of {m} meters.",
        ),
        n=long,
        m=wide,
    )
    if d.rng.random() < 0.5:
        d.unit = ("square meter", "square meters")
        d.ask(("What is its area in square meters?", "How many square meters is that?"))
        d.work(f"The area is {multiply(long, wide)} square meters.", long * wide)
        return
    d.unit = ("meter", "meters")
    d.ask(("How many meters is it all the way around?", "What is its perimeter in meters?"))
    d.work(f"One long and one short side are {add(long, wide)} meters.", long + wide)
    d.work(f"All the way around is {multiply(long + wide, 2)} meters.", (long + wide) * 2)


def tank(d: Draft) -> None:
    k, rate = d.number(2, 9), d.number(2, 40)
    start = k * rate + d.number(2, 200)
    d.unit = ("liter", "liters")
    is_full = d.rng.random() < 0.5
    d.say(
        ("A tank holds {n} liters of water.", "{name} has a barrel with {n} liters of rain.")
        if is_full
        else ("{name} pours {n} liters into a pool.", "There are {n} liters in a pond."),
        n=start,
    )
    if is_full:
        d.say(
            (
                "Every hour {m} liters run out, for {k} hours.",
                "{k} buckets of {m} liters are taken out.",
            ),
            m=rate,
            k=k,
        )
    else:
        d.say(
            (
                "Then {k} buckets of {m} liters are added.",
                "It rains, and {m} liters come in on each of {k} days.",
            ),
            m=rate,
            k=k,
        )
    d.ask(("How many liters are in it now?", "How many liters is that in the end?"))
    d.work(f"That is {multiply(rate, k)} liters.", rate * k)
    if is_full:
        d.work(f"Now there are {subtract(start, rate * k)} liters.", start - rate * k)
    else:
        d.work(f"Now there are {add(start, rate * k)} liters.", start + rate * k)


def temperature(d: Draft) -> None:
    start, rise = d.number(2, 25), d.number(2, 15)
    fall = d.number(2, start + rise)
    d.unit = ("degree", "degrees")
    d.say(
        (
            "In the morning it is {n} degrees. It gets {m} degrees warmer and then {k} degrees colder.",
            "The oven is at {n} degrees. It rises by {m} degrees and then falls by {k} degrees.",
        ),
        n=start,
        m=rise,
        k=fall,
    )
    d.ask(("How many degrees is it then?", "What is the temperature in the end?"))
    d.work(f"First it gets to {add(start, rise)} degrees.", start + rise)
    d.work(f"Then it falls to {subtract(start + rise, fall)} degrees.", start + rise - fall)


def stairs(d: Draft) -> None:
    floors, steps = d.number(2, 12), d.number(8, 30)
    d.unit = ("step", "steps")
    d.say(
        (
            "A tower has {k} floors with {n} steps each. {name} has climbed {m} steps.",
            "{name} climbs a hill. The path has {k} parts of {n} steps, and {he} has done {m} steps.",
        ),
        k=floors,
        n=steps,
        m=(done := d.number(2, floors * steps - 1)),
    )
    d.ask(("How many steps are left?", "How many steps does {he} still have to climb?"))
    d.work(f"There are {multiply(floors, steps)} steps.", floors * steps)
    d.work(f"Left are {subtract(floors * steps, done)} steps.", floors * steps - done)


def expenses(d: Draft) -> None:
    a, b, c = d.number(2, 60), d.number(2, 60), d.number(2, 60)
    budget = a + b + c + d.number(2, 100)
    d.unit = DOLLARS
    d.say(
        (
            "{name} pays ${a} for food, ${b} for {a_other} and ${c} for a bus pass.",
            "{name} pays {a} dollars for a train, {b} dollars for a room and {c} dollars for a meal.",
        ),
        a=a,
        b=b,
        c=c,
    )
    d.work(f"That costs {add_three(a, b, c)} dollars.", a + b + c)
    if d.rng.random() < 0.4:
        d.ask(("How many dollars is that in total?", "How much does {he} pay in all?"))
        return
    d.say(("Before that {he} had ${m}.", "{He} had taken {m} dollars along."), m=budget)
    d.ask(("How many dollars are left?", "How much money does {he} have left?"))
    d.work(f"Left are {subtract(budget, a + b + c)} dollars.", budget - a - b - c)


MEASURE_SCENES = (
    buy, buy_two_sorts, tickets, wages, save_up, discount, ages, travel, speed_of, round_trips, reading,
    minutes, hours_to_minutes, machine, weights, garden, tank, temperature, stairs, expenses,
)  # fmt: skip
