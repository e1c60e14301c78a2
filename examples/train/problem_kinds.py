# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""The five kinds of word problem, each with its worked solution.

A kind draws numbers freely; problems.py drops what leaves the range.
"""

import random
from collections.abc import Callable

NAMES = (
    "Amy Bea Carl Dora Emil Fay Glen Hana Ivan Jane Karl Lena Mark Nora Otto "
    "Pia Ruth Seth Tara Ute Vic Wanda Yara Zack"
).split()
ITEMS = (
    "apples pens books cards coins shells stamps marbles stickers cookies "
    "oranges pencils beads toys eggs flowers muffins balloons buttons rocks"
).split()
CONTAINERS = {
    "boxes": "box",
    "bags": "bag",
    "packs": "pack",
    "baskets": "basket",
    "jars": "jar",
    "trays": "tray",
}
GAINS = (
    ("finds {n} more {item}", "finds {n} more"),
    ("buys {n} more {item}", "buys {n} more"),
    ("gets {n} {item} from a friend", "gets {n} more"),
    ("wins {n} {item} at the fair", "wins {n} more"),
)
LOSSES = (
    ("gives {n} {item} to {other}", "gives away {n}"),
    ("loses {n} {item}", "loses {n}"),
    ("sells {n} {item} at the market", "sells {n}"),
    ("uses {n} {item} for a project", "uses {n}"),
)
TIMES = {2: "twice", 3: "three times", 4: "four times", 5: "five times"}
ACTIVITIES = (
    ("reads", "pages", "book"),
    ("walks", "miles", "trail"),
    ("paints", "tiles", "wall"),
    ("solves", "puzzles", "set"),
)

Draft = tuple[list[str], list[str], int]


def _stock(rng: random.Random, steps: int) -> Draft:
    """Somebody owns things and then gains or loses some."""
    name, other = rng.sample(NAMES, 2)
    item = rng.choice(ITEMS)
    if rng.random() < (0.6 if steps == 1 else 0.5):
        have = rng.randint(11, 99)
        ask = [f"{name} has {have} {item}."]
        work = [f"{name} starts with {have} {item}."]
        changes = steps
    else:
        groups, size = rng.randint(2, 9), rng.randint(3, 15)
        plural = rng.choice(list(CONTAINERS))
        have = groups * size
        ask = [
            f"{name} has {groups} {plural} with {size} {item} in each "
            f"{CONTAINERS[plural]}."
        ]
        work = [f"{name} starts with {groups}*{size}={have} {item}."]
        changes = steps - 1
    for index in range(changes):
        then = "Then " if index else ""
        if have > 20 and rng.random() < 0.5:
            n = rng.randint(2, have - 1)
            (told, said), left = rng.choice(LOSSES), have - n
            formula = f"{have}-{n}={left}"
        else:
            n = rng.randint(3, 99)
            (told, said), left = rng.choice(GAINS), have + n
            formula = f"{have}+{n}={left}"
        ask.append(f"{then}{name} {told.format(n=n, item=item, other=other)}.")
        work.append(f"{then}{name} {said.format(n=n)}, so {formula}.")
        have = left
    when = rng.choice(("now", "in the end"))
    ask.append(f"How many {item} does {name} have {when}?")
    return ask, work, have


def _compare(rng: random.Random, steps: int) -> Draft:
    """One person owns more or fewer than another; perhaps a total."""
    first, second, third = rng.sample(NAMES, 3)
    item = rng.choice(ITEMS)
    a = rng.randint(11, 60)
    kind = rng.choices(("more", "fewer", "times"), (0.4, 0.3, 0.3))[0]
    ask = [f"{first} has {a} {item}."]
    work = [f"{first} has {a} {item}."]
    if kind == "times":
        factor = rng.randint(2, 5)
        b = a * factor
        ask.append(f"{second} has {TIMES[factor]} as many {item} as {first}.")
        work.append(f"{second} has {TIMES[factor]} as many, so {a}*{factor}={b}.")
    else:
        n = rng.randint(3, 50) if kind == "more" else rng.randint(2, a - 2)
        sign, b = ("+", a + n) if kind == "more" else ("-", a - n)
        ask.append(f"{second} has {n} {kind} {item} than {first}.")
        work.append(f"{second} has {n} {kind}, so {a}{sign}{n}={b}.")
    if steps == 1:
        ask.append(f"How many {item} does {second} have?")
        return ask, work, b
    both = a + b
    if steps == 2:
        ask.append(f"How many {item} do {first} and {second} have together?")
        work.append(f"Together they have {a}+{b}={both}.")
        return ask, work, both
    c = rng.randint(3, 60)
    ask.append(f"{third} has {c} {item}.")
    ask.append(f"How many {item} do they have in total?")
    work.append(f"{first} and {second} have {a}+{b}={both}.")
    work.append(f"With the {c} of {third} it is {both}+{c}={both + c}.")
    return ask, work, both + c


def _purchase(rng: random.Random, steps: int) -> Draft:
    """Several things at one price; perhaps another thing, perhaps change."""
    name = rng.choice(NAMES)
    item, extra = rng.sample(ITEMS, 2)
    count, price = rng.randint(2, 9), rng.randint(2, 15)
    cost = count * price
    ask = [f"{name} buys {count} {item} for {price} dollars each."]
    work = [f"The {item} cost {count}*{price}={cost} dollars."]
    if steps == 1:
        return ask + [f"How much does {name} pay?"], work, cost
    if steps == 2 and rng.random() < 0.5:
        more = rng.randint(5, 80)
        ask.append(f"{name} also buys some {extra} for {more} dollars.")
        ask.append(f"How much does {name} pay in total?")
        work.append(f"In total {name} pays {cost}+{more}={cost + more} dollars.")
        return ask, work, cost + more
    if steps == 3:
        more = rng.randint(5, 60)
        ask.append(f"{name} also buys some {extra} for {more} dollars.")
        work.append(f"With the {extra} it is {cost}+{more}={cost + more} dollars.")
        cost += more
    left = rng.randint(3, 60)
    ask.append(f"{name} had {cost + left} dollars at first.")
    ask.append("How many dollars are left?")
    work.append(f"{name} has {cost + left}-{cost}={left} dollars left.")
    return ask, work, left


def _pace(rng: random.Random, steps: int) -> Draft:
    """The same amount every day; perhaps a rest to do."""
    name = rng.choice(NAMES)
    does, unit, whole = rng.choice(ACTIVITIES)
    daily, days = rng.randint(3, 15), rng.randint(2, 9)
    done = daily * days
    ask = [f"{name} {does} {daily} {unit} each day for {days} days."]
    work = [f"{name} {does} {daily}*{days}={done} {unit}."]
    if steps == 1:
        return ask + [f"How many {unit} is that?"], work, done
    if steps == 3:
        more = rng.randint(3, 50)
        ask.append(f"Then {name} {does} {more} more {unit}.")
        work.append(f"With {more} more it is {done}+{more}={done + more}.")
        done += more
    left = rng.randint(3, 70)
    ask.append(f"The {whole} has {done + left} {unit}. How many {unit} are left?")
    work.append(f"There are {done + left}-{done}={left} {unit} left.")
    return ask, work, left


def _share(rng: random.Random, steps: int) -> Draft:
    """Equal shares, of what is left or of what was added up."""
    name, item = rng.choice(NAMES), rng.choice(ITEMS)
    friends, each = rng.randint(2, 9), rng.randint(2, 15)
    total = friends * each
    among = f"equally among {friends} friends."
    divide = f"Each friend gets {total}/{friends}={each}"
    ask_each = f"How many {item} does each friend get?"
    if steps == 1:
        ask = [f"{name} has {total} {item}. {name} shares them {among} {ask_each}"]
        return ask, [f"{divide} {item}."], each
    if steps == 2:
        kept = rng.randint(3, 60)
        ask = [
            f"{name} has {total + kept} {item}. {name} keeps {kept} of them and "
            f"shares the rest {among} {ask_each}"
        ]
        work = [f"{name} shares {total + kept}-{kept}={total} {item}."]
        return ask, work + [f"{divide} {item}."], each
    bought = rng.randint(1, total - 1)
    ask = [
        f"{name} has {total - bought} {item} and buys {bought} more. {name} shares "
        f"them {among} One friend already had {bought} {item}. How many {item} does "
        "that friend have now?"
    ]
    work = [
        f"{name} shares {total - bought}+{bought}={total} {item}.",
        f"{divide}.",
        f"The friend has {each}+{bought}={each + bought} {item}.",
    ]
    return ask, work, each + bought


KINDS: dict[Callable[[random.Random, int], Draft], float] = {
    _stock: 0.36,
    _compare: 0.20,
    _purchase: 0.16,
    _pace: 0.14,
    _share: 0.14,
}
