"""Flax's examples that read text, and nanodo."""

import random
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from .kinds import Linen, Nnx
from .source import Checkouts

VOCABULARY, LENGTH = 64, 16


def tokens(seed: int, batch: int = 4, length: int = LENGTH) -> jax.Array:
    """Rows of tokens, some of which end in padding (0)."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(3, VOCABULARY, (batch, length))
    ends = rng.integers(length // 2, length + 1, (batch, 1))
    return jnp.asarray(np.where(np.arange(length) < ends, ids, 0))


def gemma(checkouts: Checkouts, version: str, **fields) -> Nnx:
    """Two layers of one Gemma version, with its published options."""
    train, config, transformer = checkouts.modules(
        "flax/examples/gemma", "train", "transformer_cfg", "transformer"
    )
    kinds = config.AttentionType
    fields = {
        "num_layers": 2,
        "num_embed": VOCABULARY,
        "embed_dim": 32,
        "hidden_dim": 64,
        "head_dim": 16,
        "dtype": None,
        "attention_types": (kinds.LOCAL_SLIDING, kinds.GLOBAL),
    } | fields
    fields = {"sliding_window_size": 4} | fields if version != "gemma_7b" else fields
    if version == "gemma_7b":
        fields["attention_types"] = (kinds.GLOBAL,) * 2
    options = config.TransformerConfig.from_version_name(version, **fields)
    inputs = tokens(1)
    targets = jnp.pad(inputs[:, 1:], ((0, 0), (0, 1)))
    present = inputs > 0
    positions = transformer.build_positions_from_mask(present)
    mask = transformer.make_causal_attn_mask(present)

    def loss(model, key):
        logits, _ = model(
            inputs,
            positions=positions,
            attention_mask=mask,
            cache=None,
            rngs=nnx.Rngs(dropout=key),
        )
        weights = present.astype(jnp.float32)
        return train.compute_weighted_cross_entropy(logits, targets, weights).mean()

    return Nnx(transformer.Transformer(options, rngs=nnx.Rngs(params=0)), loss)


def gemma_1(checkouts: Checkouts) -> Nnx:
    """One projection for queries, keys and values."""
    return gemma(checkouts, "gemma_7b", num_heads=2, num_kv_heads=2)


def gemma_2(checkouts: Checkouts) -> Nnx:
    """Grouped queries, soft caps, norms after each part, sliding windows."""
    return gemma(checkouts, "gemma2_2b", num_heads=4, num_kv_heads=2)


def gemma_3(checkouts: Checkouts) -> Nnx:
    """Norms of queries and keys, two bases of the rotary angles."""
    return gemma(checkouts, "gemma3_4b", num_heads=4, num_kv_heads=2)


def small(**fields):
    """`TransformerConfig`'s arguments for both translation and language models."""
    return {
        "vocab_size": VOCABULARY,
        "output_vocab_size": VOCABULARY,
        "dtype": None,
        "emb_dim": 32,
        "num_heads": 2,
        "num_layers": 2,
        "qkv_dim": 32,
        "mlp_dim": 64,
        "max_len": LENGTH,
    } | fields


def lm1b(checkouts: Checkouts) -> Linen:
    """A language model on packed rows, with two texts in each."""
    models, train = checkouts.modules("flax/examples/lm1b", "models", "train")
    module = models.TransformerLM(models.TransformerConfig(**small()))
    inputs = tokens(2)
    segments = jnp.where(jnp.arange(LENGTH) < LENGTH // 2, 1, 2) * (inputs > 0)
    positions = jnp.arange(LENGTH) % (LENGTH // 2) * (inputs > 0)
    weights = jnp.where(inputs > 0, 1, 0).astype(jnp.float32)

    def run(module, variables, key):
        return module.apply(
            variables,
            inputs,
            inputs_positions=positions,
            inputs_segmentation=segments,
            rngs={"dropout": key},
        )

    def loss(module, variables, key):
        logits = run(module, variables, key)
        total, count = train.compute_weighted_cross_entropy(
            logits, inputs, weights, 0.1
        )
        return total / count, {}

    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    return Linen(module, jax.jit(module.init)(keys, inputs), loss)


def wmt(checkouts: Checkouts) -> Linen:
    """An encoder and a decoder with a shared embedding."""
    models, train = checkouts.modules("flax/examples/wmt", "models", "train")
    options = small(share_embeddings=True, logits_via_embedding=True)
    module = models.Transformer(models.TransformerConfig(**options))
    inputs, targets = tokens(3, batch=16), tokens(4, batch=16)
    weights = jnp.where(targets > 0, 1, 0).astype(jnp.float32)

    def loss(module, variables, key):
        logits = module.apply(variables, inputs, targets, rngs={"dropout": key})
        total, count = train.compute_weighted_cross_entropy(
            logits, targets, weights, 0.1
        )
        return total / count, {}

    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    return Linen(module, jax.jit(module.init)(keys, inputs, targets), loss)


def sst2(checkouts: Checkouts) -> Linen:
    """A bidirectional LSTM with attention."""
    models, train = checkouts.modules("flax/examples/sst2", "models", "train")
    module = models.TextClassifier(
        embedding_size=32,
        hidden_size=32,
        vocab_size=VOCABULARY,
        output_size=1,
        dropout_rate=0.5,
        word_dropout_rate=0.1,
    )
    ids = tokens(5, batch=8)
    lengths = jnp.sum(ids > 0, axis=1)
    labels = jnp.arange(8)[:, None] % 2

    def loss(module, variables, key):
        logits = module.apply(
            variables, ids, lengths, deterministic=False, rngs={"dropout": key}
        )
        losses = train.sigmoid_cross_entropy_with_logits(labels=labels, logits=logits)
        return jnp.mean(losses), {}

    variables = jax.jit(partial(module.init, deterministic=True))(
        jax.random.key(0), ids, lengths
    )
    return Linen(module, variables, loss)


def seq2seq(checkouts: Checkouts) -> Linen:
    """Learns to add; each step of the decoder reads what the previous one sampled."""
    models, train, pipeline = checkouts.modules(
        "flax/examples/seq2seq", "models", "train", "input_pipeline"
    )
    random.seed(0)
    table = pipeline.CharacterTable("0123456789+= ", 2)
    batch = jax.tree.map(jnp.asarray, table.get_batch(8))
    module = models.Seq2seq(
        teacher_force=False,
        hidden_size=32,
        vocab_size=table.vocab_size,
        eos_id=table.eos_id,
    )
    labels = batch["answer"][:, 1:]
    lengths = pipeline.get_sequence_lengths(labels, table.eos_id)

    def loss(module, variables, key):
        logits, _ = module.apply(
            variables, batch["query"], batch["answer"], rngs={"lstm": key}
        )
        return train.cross_entropy_loss(logits, labels, lengths), {}

    keys = {"params": jax.random.key(0), "lstm": jax.random.key(1)}
    variables = jax.jit(module.init)(keys, batch["query"], batch["answer"])
    return Linen(module, variables, loss)


def nanodo(checkouts: Checkouts) -> Linen:
    """A decoder whose mask needs a dtype, so float32 stays in its configuration."""
    model, losses = checkouts.modules("nanodo", "nanodo.model", "nanodo.loss")
    options = model.DoConfig(
        D=32, H=2, L=LENGTH, N=2, V=VOCABULARY, F=64, fsdp_enabled=False
    )
    module = model.TransformerDo(options)
    inputs = tokens(6)

    def loss(module, variables, key):
        loss_fn = losses.get_default_loss_fn(inputs, module.apply, {})
        return loss_fn(variables["params"])[0], {}

    return Linen(module, jax.jit(module.init)(jax.random.key(0), inputs), loss)
