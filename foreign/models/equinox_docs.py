"""Models from the notebooks in Equinox's documentation."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .kinds import Equinox
from .source import Checkouts

EXAMPLES = "equinox/docs/examples"


def vision_transformer(checkouts: Checkouts) -> Equinox:
    """A vision transformer, with dropout."""
    book = checkouts.notebook(f"{EXAMPLES}/vision_transformer.ipynb", channels=3)
    model = book.VisionTransformer(
        embedding_dim=32,
        hidden_dim=64,
        num_heads=2,
        num_layers=2,
        dropout_rate=0.1,
        patch_size=4,
        num_patches=16,
        num_classes=10,
        key=jax.random.key(0),
    )
    rng = np.random.default_rng(0)
    images = jnp.asarray(rng.normal(size=(8, 3, 16, 16)), jnp.float32)
    labels = jnp.asarray(rng.integers(0, 10, 8))

    def loss(model, key):
        keys = jax.random.split(key, 8)
        logits = jax.vmap(model, in_axes=(0, None, 0))(images, True, keys)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return jnp.mean(losses)

    return Equinox(model, loss)


def bert(checkouts: Checkouts) -> Equinox:
    """A classifier on BERT, with padding and dropout."""
    book = checkouts.notebook(f"{EXAMPLES}/bert.ipynb")
    config = {
        "vocab_size": 64,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "hidden_dropout_prob": 0.1,
        "attention_probs_dropout_prob": 0.1,
        "max_position_embeddings": 16,
        "type_vocab_size": 2,
    }
    model = book.BertClassifier(config, num_classes=2, key=jax.random.key(0))
    rng = np.random.default_rng(0)
    ids = rng.integers(1, 64, (8, 16))
    ids = np.where(np.arange(16) < rng.integers(8, 17, (8, 1)), ids, 0)
    inputs = {
        "token_ids": jnp.asarray(ids),
        "segment_ids": jnp.asarray(np.arange(16) // 8 * np.ones_like(ids)),
    }
    labels = jnp.arange(8) % 2

    def loss(model, key):
        keys = jax.random.split(key, 8)
        logits = jax.vmap(model, in_axes=(0, None, 0))(inputs, True, keys)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return jnp.mean(losses)

    return Equinox(model, loss)
