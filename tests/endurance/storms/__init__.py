"""Storms: random trees, optimizers, overflows and calls, against plain models.

Four kinds, each a generator and an oracle. A storm is drawn from (kind, seed, number)
and holds many cases; a failure prints the command that draws it again.

* `trees`: random trees, optimizers, nestings and settings, against the bare optimizer
  on gradients that NumPy unscaled;
* `calls`: random calls of a `GradScaler`, against a state machine of torch's;
* `garbage`: wrong arguments, each of which jamp must refuse with its own message;
* `programs`: random programs in autocast regions, against the same without caches.

    python -m tests.endurance.storms --cases 100000 --seed 0
    python -m tests.endurance.storms --kind trees --seed 0 --number 17
"""

from .calls import call_storm
from .garbage import garbage_storm
from .programs import program_storm
from .trees import tree_storm

STORMS = {
    "trees": tree_storm,
    "calls": call_storm,
    "garbage": garbage_storm,
    "programs": program_storm,
}


def rage(kind: str, seed: int, numbers: range, cases: int) -> int:
    """Runs storms of one kind; returns how many cases they held."""
    for number in numbers:
        try:
            STORMS[kind](seed, number, cases)
        except Exception as error:
            again = f"--kind {kind} --seed {seed} --number {number} --batch {cases}"
            error.add_note(f"again with: python -m tests.endurance.storms {again}")
            raise
    return len(numbers) * cases
