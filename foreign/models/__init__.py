"""Other projects' models, small enough to train on a CPU in seconds.

Each module has a function for each model of one project. The function gets a
`Checkouts`, imports the model's own code from there, and returns a `Linen`, `Nnx` or
`Equinox` with made-up data. None of that code is kept here.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from . import bonsai, equinox_docs, flax_text, flax_vision
from .kinds import Equinox, Linen, Nnx
from .source import Checkouts

Model = Linen | Nnx | Equinox


class Entry(NamedTuple):
    """A model to try.

    Attributes:
      project: the checkout that it comes from.
      make: makes it.
    """

    project: str
    make: Callable[[Checkouts], Model]


MODELS: dict[str, Entry] = {
    "gemma 1": Entry("flax", flax_text.gemma_1),
    "gemma 2": Entry("flax", flax_text.gemma_2),
    "gemma 3": Entry("flax", flax_text.gemma_3),
    "lm1b": Entry("flax", flax_text.lm1b),
    "wmt": Entry("flax", flax_text.wmt),
    "sst2": Entry("flax", flax_text.sst2),
    "seq2seq": Entry("flax", flax_text.seq2seq),
    "imagenet": Entry("flax", flax_vision.imagenet),
    "vae": Entry("flax", flax_vision.vae),
    "ppo": Entry("flax", flax_vision.ppo),
    "ogbg GraphNet": Entry("flax", flax_vision.ogbg_net),
    "ogbg GraphConvNet": Entry("flax", flax_vision.ogbg_conv),
    "Qwen3": Entry("bonsai", bonsai.qwen3),
    "Mamba2": Entry("bonsai", bonsai.mamba2),
    "VAE": Entry("bonsai", bonsai.vae),
    "Whisper": Entry("bonsai", bonsai.whisper),
    "nanodo": Entry("nanodo", flax_text.nanodo),
    "ViT": Entry("equinox", equinox_docs.vision_transformer),
    "BERT": Entry("equinox", equinox_docs.bert),
}

SOURCES: dict[str, Any] = {
    "flax": "google/flax, examples/",
    "bonsai": "jax-ml/bonsai",
    "nanodo": "google-deepmind/nanodo",
    "equinox": "patrick-kidger/equinox, docs/examples/",
}
