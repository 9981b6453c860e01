"""Words to fill problems with: people, things, places, and invented words that cannot be memorized.

Only word lists and draws from them; no sentence is written here.
"""

from __future__ import annotations

from random import Random

from training.problems.draw import between, pick

Person = dict[str, str]  # the name and its pronouns


def words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_WOMEN = words(
    """
    Mia Anna Ada Lena Sofia Emma Olivia Ava Zoe Nina Clara Ella Grace Ruth Iris Maya Leila Amina
    Fatima Aisha Priya Anika Meera Mei Yuki Hana Sakura Linh Thuy Ingrid Astrid Freya Elsa Maria
    Lucia Carmen Elena Rosa Paula Ines Marta Julia Eva Vera Olga Daria Nadia Tara Sara Hannah Leah
    Naomi Esther Alice Nora Molly Kate Jane Lucy Amy Bella Chloe Daisy Flora Gina Holly Ivy Joan Kim
    Laura Megan Penny Rita Tina Wendy Zara
    """
)

_MEN = words(
    """
    Tom Ben Sam Max Leo Noah Liam Jack Adam Paul Peter Mark Luke John James David Daniel Oscar Hugo
    Felix Anton Ivan Boris Oleg Yusuf Omar Ali Hassan Karim Tariq Raj Arjun Ravi Vikram Wei Jun
    Kenji Hiro Minh Duc Lars Erik Sven Nils Olaf Carlos Diego Pablo Luis Marco Bruno Pedro Rafael
    Mateo Otto Karl Fritz Hans Emil Finn Owen Ryan Sean Alan Brian Carl Dan Ed Frank Gary Henry Ian
    Jake Kyle Nick Pat Rob Simon Tim Victor Will Zack
    """
)


def _person(name: str, is_woman: bool) -> Person:
    he, his, him = ("she", "her", "her") if is_woman else ("he", "his", "him")
    return {
        "name": name,
        "he": he,
        "He": he.capitalize(),
        "his": his,
        "His": his.capitalize(),
        "him": him,
    }


PEOPLE = tuple([_person(name, True) for name in _WOMEN] + [_person(name, False) for name in _MEN])

# Singular, or singular and plural where the plural is not regular.
_COUNTABLE = words(
    """
    apple orange banana lemon plum carrot potato:potatoes tomato:tomatoes onion egg cookie muffin
    cupcake sandwich:sandwiches pancake donut bagel grape nut cake pizza candle book notebook pencil
    pen crayon eraser marker sticker stamp card coin marble button bead ribbon shell stone
    leaf:leaves flower rose tulip seed tree bush:bushes toy doll ball kite puzzle balloon drum robot
    block brick tile nail screw hammer rope key lamp chair table cup plate bowl spoon fork
    knife:knives glass:glasses bottle jar basket hat scarf:scarves sock shoe shirt jacket glove
    towel blanket pillow photo poster painting letter envelope ticket map badge medal magnet
    battery:batteries cable phone clock chicken duck goose:geese sheep:sheep goat rabbit kitten
    puppy:puppies fish:fish bird horse pony:ponies bee butterfly:butterflies strawberry:strawberries
    cherry:cherries berry:berries peach:peaches kit pumpkin melon
    """
)

THINGS = tuple(
    (word.partition(":")[0], word.partition(":")[2] or word + "s") for word in _COUNTABLE
)

COLOURS = words(
    """
    red blue green yellow orange purple pink black white brown grey silver gold violet teal beige
    crimson turquoise maroon lavender
    """
)

CITIES = words(
    """
    London Paris Berlin Madrid Rome Vienna Oslo Stockholm Helsinki Warsaw Prague Lisbon Dublin
    Athens Cairo Nairobi Lagos Accra Tunis Mumbai Delhi Chennai Dhaka Beijing Shanghai Tokyo Osaka
    Kyoto Seoul Bangkok Hanoi Manila Jakarta Sydney Perth Auckland Toronto Montreal Boston Chicago
    Denver Seattle Miami Austin Lima Quito Bogota Santiago Havana Zurich Geneva Lyon Munich Hamburg
    Milan Naples Porto Gdansk Bergen Tampere
    """
)

COUNTRIES = words(
    """
    France Germany Spain Italy Norway Sweden Finland Poland Portugal Ireland Greece Egypt Kenya
    Ghana India China Japan Korea Thailand Vietnam Indonesia Australia Canada Mexico Peru Chile
    Brazil Cuba Turkey Iceland Austria Hungary Morocco Nepal
    """
)

ANIMALS = words(
    "dog cat hamster parrot rabbit turtle goldfish pony lizard canary mouse goat duck snake"
)

FOODS = words(
    """
    pizza soup pasta rice bread salad curry sushi noodles pancakes cheese chocolate honey mango
    waffles dumplings lentils tacos porridge olives
    """
)

WEEKDAYS = words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")

MONTHS = words(
    "January February March April May June July August September October November December"
)

ROOMS = words(
    "kitchen bedroom bathroom office garage hallway cellar attic garden library studio nursery"
)

_ONSETS = words("b br c cl d dr f fl g gr h j k kr l m n p pl qu r s sh sk st t th tr v w y z")
_VOWELS = words("a e i o u a e i o u ai ea")
_CODAS = ["", "", "", "", "l", "n", "r", "s", "t", "m", "x", "nd", "rk", "ck"]
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def invented_word(rng: Random) -> str:
    """Two or three syllables that are not a word, capitalized."""
    num_syllables = 2 if rng.random() < 0.7 else 3
    syllables = [pick(rng, _ONSETS) + pick(rng, _VOWELS) for _ in range(num_syllables)]
    return ("".join(syllables) + pick(rng, _CODAS)).capitalize()


def invented_code(rng: Random) -> str:
    """An identifier such as KX-4821, b7f02 or 5930, which must be copied, not guessed."""
    form = rng.random()
    if form < 0.35:
        return f"{pick(rng, _LETTERS)}{pick(rng, _LETTERS)}-{between(rng, 100, 9999)}"
    if form < 0.6:
        return f"{pick(rng, _LETTERS)}{between(rng, 10, 999)}"
    if form < 0.8:
        letters = pick(rng, _LETTERS), pick(rng, _LETTERS)
        return f"{letters[0].lower()}{between(rng, 0, 9)}{letters[1].lower()}{between(rng, 10, 99)}"
    return str(between(rng, 1000, 99999))


def person(rng: Random) -> Person:
    """A name with its pronouns; one in ten is an invented name."""
    return (
        _person(invented_word(rng), rng.random() < 0.5) if rng.random() < 0.1 else pick(rng, PEOPLE)
    )


def thing(rng: Random) -> tuple[str, str]:
    """A countable thing and its plural; one in sixteen is an invented word."""
    if rng.random() < 0.06:
        word = invented_word(rng).lower()
        return word, word + ("es" if word.endswith(("s", "x", "sh")) else "s")
    return pick(rng, THINGS)
