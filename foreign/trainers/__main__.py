"""`python -m foreign.trainers NAME WAY --source DIR --to FILE`: one run, in a process.

`foreign.train` starts it: trainers set flags of XLA, the working folder and
`sys.argv`.
"""

import argparse
import pickle
import tempfile
from pathlib import Path

from ..models.source import Checkouts
from . import TRAINERS, WAYS
from .conversion import convert
from .record import record


def main() -> None:
    """Edits a copy, runs it, and pickles the `Record`."""
    parser = argparse.ArgumentParser(prog="python -m foreign.trainers")
    parser.add_argument("name", choices=tuple(TRAINERS))
    parser.add_argument("way", choices=tuple(WAYS))
    parser.add_argument("--source", type=Path, required=True)
    parser.add_argument("--to", type=Path, required=True)
    options = parser.parse_args()
    trainer = TRAINERS[options.name]
    with tempfile.TemporaryDirectory() as folder:
        source = options.source.resolve() / trainer.project
        target = Path(folder, trainer.project)
        way = WAYS[options.way]
        lines = convert(source, target, trainer.harness, trainer.edits(way))
        outcome = trainer.run(Checkouts(Path(folder)))
        result = record(outcome, lines, bool(way.scale))
    options.to.write_bytes(pickle.dumps(result))


if __name__ == "__main__":
    main()
