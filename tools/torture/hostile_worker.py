"""One process of hostile clients: `clients` starts several and reads what they write, as JSON.

Connection number N of a seed always does the same, whichever process makes it. `span` is
`first:last:step`; at most `parked` connections are left hanging until the end. The connections are
spread over `seconds` evenly, or made as fast as they can be where that is 0. A line is written when
all of them were made, and the JSON once the parked ones have ended, too.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections import Counter
from pathlib import Path

from tools.torture.hostile_acts import ACTS, Attack, WrongAnswer, end_parked

_WRONG_MAX = 20


def main(path: str, object_bytes: str, seed: str, span: str, parked: str, seconds: str) -> None:
    attack = Attack(Path(path), random.Random(0), int(object_bytes), [], int(parked))
    told: Counter[str] = Counter()
    wrong: list[str] = []
    numbers = range(*map(int, span.split(":")))
    pause, began = float(seconds) / max(1, len(numbers)), time.monotonic()
    for made, number in enumerate(numbers):
        time.sleep(max(0.0, began + made * pause - time.monotonic()))
        attack.rng = random.Random(f"{seed}/{number}")
        act = attack.rng.choice(ACTS)
        name = act.__name__.replace("_", " ")
        try:
            told[f"{name}: {act(attack)}"] += 1
        except WrongAnswer as error:
            wrong.append(f"connection {number}, {name}: {error}")
        except TimeoutError:
            wrong.append(f"connection {number}, {name}: no answer came")
        except OSError as error:
            wrong.append(f"connection {number}, {name}: {error!r}")
        if len(wrong) >= _WRONG_MAX:
            break
    print("made", flush=True)
    try:
        told.update(f"half head: then {end}" for end in end_parked(attack))
    except WrongAnswer as error:
        wrong.append(str(error))
    json.dump({"told": told, "wrong": wrong}, sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
