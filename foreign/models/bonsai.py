"""Models of jax-ml/bonsai, in Flax NNX."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from .kinds import Nnx
from .source import Checkouts

VOCABULARY, LENGTH = 64, 16


def modeling(checkouts: Checkouts, name: str):
    return checkouts.modules("bonsai", f"bonsai.models.{name}.modeling")[0]


def qwen3(checkouts: Checkouts) -> Nnx:
    """Reads texts of several lengths, padded on the left to align their ends."""
    library = modeling(checkouts, "qwen3")
    config = library.ModelConfig(
        num_layers=2,
        vocab_size=VOCABULARY,
        emb_dim=32,
        mlp_dim=64,
        num_heads=4,
        head_dim=16,
        num_kv_heads=2,
        rope_theta=1_000_000,
        rope_scaling_factor=8.0,
        local_rope_theta=1e4,
        norm_eps=1e-6,
        tie_word_embeddings=True,
    )
    rng = np.random.default_rng(0)
    ids = rng.integers(1, VOCABULARY, (4, LENGTH))
    padded = np.arange(LENGTH) < np.array([[0], [3], [7], [10]])
    tokens = jnp.asarray(np.where(padded, 0, ids))
    present = 1 * (tokens != 0)

    def loss(model, key):
        cache = library.init_cache(config, 4, LENGTH, 0, dtype=jnp.float32)
        logits = model(tokens, cache=cache, segment_ids=present)
        losses = optax.softmax_cross_entropy_with_integer_labels(
            logits[:, :-1], tokens[:, 1:]
        )
        return jnp.sum(losses * present[:, :-1]) / jnp.sum(present[:, :-1])

    return Nnx(library.Qwen3(config, rngs=nnx.Rngs(0)), loss)


def mamba2(checkouts: Checkouts) -> Nnx:
    """A state space model over two chunks and a half."""
    library = modeling(checkouts, "mamba2")
    config = dataclasses.replace(library.ModelConfig.tiny(), vocab_size=VOCABULARY)
    rng = np.random.default_rng(0)
    tokens = jnp.asarray(rng.integers(0, VOCABULARY, (2, 80)))

    def loss(model, key):
        return model(tokens, labels=tokens)["loss"]

    return Nnx(library.Mamba2ForCausalLM(config, rngs=nnx.Rngs(0)), loss)


def vae(checkouts: Checkouts) -> Nnx:
    """Stable Diffusion's autoencoder."""
    library = modeling(checkouts, "vae")
    config = library.ModelConfig(
        block_out_channels=(8, 16), latent_channels=2, norm_num_groups=4
    )
    rng = np.random.default_rng(0)
    images = jnp.asarray(rng.normal(size=(2, 16, 16, 3)), jnp.float32)

    def loss(model, key):
        return jnp.mean((model(images) - images) ** 2)

    return Nnx(library.VAE(config, rngs=nnx.Rngs(0)), loss)


def whisper(checkouts: Checkouts) -> Nnx:
    """From spectrograms to text; the checkout has no `__call__` for the whole model."""
    library = modeling(checkouts, "whisper")
    config = dataclasses.replace(
        library.ModelConfig.whisper_tiny(),
        d_model=32,
        num_mel_bins=8,
        max_source_positions=16,
        max_length=LENGTH,
        vocab_size=VOCABULARY,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
    )
    rng = np.random.default_rng(0)
    sound = jnp.asarray(rng.normal(size=(2, 32, 8)), jnp.float32)
    text = jnp.asarray(rng.integers(0, VOCABULARY, (2, LENGTH)))
    causal = nnx.make_causal_mask(text)

    def loss(model, key):
        heard = model.encoder(sound)
        hidden = model.decoder(text, causal, heard, None, decode=False)
        logits = hidden @ model.decoder.embed_tokens.embedding[...].T
        losses = optax.softmax_cross_entropy_with_integer_labels(
            logits[:, :-1], text[:, 1:]
        )
        return jnp.mean(losses)

    return Nnx(library.Whisper(config, rngs=nnx.Rngs(0)), loss)
