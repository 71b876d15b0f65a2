"""Other projects' whole training loops, on made-up data, small enough for a CPU.

Each module has the edits that turn jamp on in a copy of one project's source, and a
function that runs the project's own loop. None of that code is kept here, except the
single lines that an edit looks for. They need `pip install clu distrax einops
google-metrax gymnax ml_collections numba omegaconf pylatexenc python-dotenv qwix
tenacity wrapt`, MaxText also `aqtp drjax jinja2 pathwaysutils pillow psutil pydantic
sympy tokamax==0.0.12` (later versions of tokamax need JAX 0.11).
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ..models.source import Checkouts
from . import maxtext, nanogpt, purejaxrl, tunix, vision_transformer
from .conversion import Edit
from .record import Outcome


class Way(NamedTuple):
    """How a trainer runs: the region's dtype, and the first loss scale if there is one.

    Without a dtype it runs as it is.
    """

    dtype: str = ""
    scale: str = ""


WAYS = {
    "float32": Way(),
    "float16": Way("jnp.float16", "2.0**8"),
    "bfloat16": Way("jnp.bfloat16"),
    "float8": Way('"float8"'),
    "from 2^16": Way("jnp.float16", "2.0**16"),
    "from 2^100": Way("jnp.float16", "2.0**100"),
}


class Trainer(NamedTuple):
    """A training loop to try.

    Attributes:
      project: the checkout that it comes from.
      harness: edits for made-up data and for letting results out. They are made in
        float32 too and do not count.
      region: the edits for bfloat16 and float8. DTYPE stands for the dtype.
      scaling: those that float16 needs besides. SCALE stands for
        the first scale, as an argument.
      run: runs the project's own loop from the edited copy.
      devices: on how many devices of the CPU.
    """

    project: str
    harness: Sequence[Edit]
    region: Sequence[Edit]
    scaling: Sequence[Edit]
    run: Callable[[Checkouts], Outcome]
    devices: int = 1

    def edits(self, way: Way) -> list[Edit]:
        chosen = [
            *(self.region if way.dtype else ()),
            *(self.scaling if way.scale else ()),
        ]

        def filled(line: str) -> str:
            line = line.replace("DTYPE", way.dtype)
            return line.replace("SCALE", f"init_scale={way.scale}")

        return [
            edit._replace(new=[filled(line) for line in edit.new]) for edit in chosen
        ]


def trainer(project: str, module: Any, devices: int = 1) -> Trainer:
    parts = module.HARNESS, module.REGION, module.SCALING, module.run
    return Trainer(project, *parts, devices)


TRAINERS = {
    "purejaxrl PPO": trainer("purejaxrl", purejaxrl),
    "vision_transformer": trainer("vision_transformer", vision_transformer, 2),
    "nanoGPT": trainer("nanoGPT-jax", nanogpt),
    "tunix GRPO": trainer("tunix", tunix),
    "MaxText": trainer("maxtext", maxtext, 2),
}

SOURCES = {
    "purejaxrl": "luchris429/purejaxrl",
    "vision_transformer": "google-research/vision_transformer",
    "tunix": "google/tunix",
    "nanoGPT-jax": "cgarciae/nanoGPT-jax",
    "maxtext": "AI-Hypercomputer/maxtext",
}
