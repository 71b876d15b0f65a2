"""Flax's examples that look at images and graphs."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from .kinds import Linen
from .source import Checkouts


def imagenet(checkouts: Checkouts) -> Linen:
    """A bottleneck ResNet; its BatchNorm averages over a mapped axis."""
    models, train = checkouts.modules("flax/examples/imagenet", "models", "train")
    module = models.ResNet(
        stage_sizes=[1, 1],
        block_cls=models.BottleneckResNetBlock,
        num_classes=train.NUM_CLASSES,
        num_filters=16,
        dtype=None,
    )
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 10, (2, 32))
    # Each class has a fixed pattern of 8x8-pixel blocks; every image adds noise.
    blocks = np.kron(rng.normal(size=(10, 4, 4, 3)), np.ones((1, 8, 8, 1)))
    noise = 0.3 * rng.normal(size=(2, 32, 32, 32, 3))
    images = jnp.asarray(blocks[labels] + noise, jnp.float32)
    labels = jnp.asarray(labels)

    def loss(module, variables, key):
        def on_one_device(images, labels):
            logits, state = module.apply(variables, images, mutable=["batch_stats"])
            return train.cross_entropy_loss(logits, labels), state

        losses, states = jax.vmap(on_one_device, axis_name="batch")(images, labels)
        return jnp.mean(losses), jax.tree.map(lambda x: x[0], states)

    return Linen(
        module,
        jax.jit(partial(module.init, train=False))(jax.random.key(0), images[0]),
        loss,
    )


def vae(checkouts: Checkouts) -> Linen:
    """The autoencoder of binary digits."""
    models, train = checkouts.modules("flax/examples/vae", "models", "train")
    module = models.model(4)
    rng = np.random.default_rng(0)
    images = jnp.asarray(rng.random((8, 784)) < 0.2, jnp.float32)

    def loss(module, variables, key):
        outputs = module.apply(variables, images, key)
        reconstructed, mean, logvar = outputs
        parts = train.compute_metrics(reconstructed, images, mean, logvar)
        return parts["loss"], {}

    variables = jax.jit(module.init)(jax.random.key(0), images, jax.random.key(1))
    return Linen(module, variables, loss)


def ppo(checkouts: Checkouts) -> Linen:
    """An actor and a critic on frames of bytes; the layers set float32 themselves."""
    models, library = checkouts.modules("flax/examples/ppo", "models", "ppo_lib")
    module, batch = models.ActorCritic(num_outputs=4), 8
    rng = np.random.default_rng(0)
    states = jnp.asarray(rng.integers(0, 256, (batch, 40, 40, 4)), jnp.uint8)
    actions = jnp.asarray(rng.integers(0, 4, batch))
    variables = jax.jit(module.init)(jax.random.key(0), states)
    old = jax.nn.log_softmax(jnp.asarray(rng.normal(size=(batch, 4)) * 0.01))
    old = jnp.take_along_axis(old, actions[:, None], axis=1)[:, 0]
    returns, advantages = jnp.asarray(rng.normal(size=(2, batch)), jnp.float32)
    minibatch = (states, actions, old.astype(jnp.float32), returns, advantages)

    def loss(module, variables, key):
        params = variables["params"]
        return library.loss_fn(params, module.apply, minibatch, 0.1, 0.5, 0.01), {}

    return Linen(module, variables, loss)


def ogbg(checkouts: Checkouts, name: str, **fields) -> Linen:
    """A graph network on a batch of molecules with padding and missing labels."""
    import jraph  # pyright: ignore

    models, train = checkouts.modules("flax/examples/ogbg_molpcba", "models", "train")
    module = getattr(models, name)(
        latent_size=32,
        num_mlp_layers=1,
        message_passing_steps=2,
        output_globals_size=8,
        dropout_rate=0.1,
        deterministic=False,
        **fields,
    )
    rng = np.random.default_rng(0)

    def molecule(atoms, bonds):
        labels = rng.integers(0, 2, (1, 8)).astype(np.float32)
        return jraph.GraphsTuple(
            n_node=np.array([atoms]),
            n_edge=np.array([bonds]),
            nodes=rng.normal(size=(atoms, 9)).astype(np.float32),
            edges=rng.normal(size=(bonds, 3)).astype(np.float32),
            globals=np.where(rng.random((1, 8)) < 0.2, np.nan, labels),
            senders=rng.integers(0, atoms, bonds),
            receivers=rng.integers(0, atoms, bonds),
        )

    batch = jraph.batch_np([molecule(6 + i, 12 + i) for i in range(4)])
    batch = jraph.pad_with_graphs(batch, n_node=48, n_edge=64, n_graph=6)
    graphs = jax.tree.map(jnp.asarray, batch)
    inputs = train.replace_globals(graphs)

    def loss(module, variables, key):
        logits = module.apply(variables, inputs, rngs={"dropout": key}).globals
        mask = train.get_valid_mask(graphs.globals, inputs)
        losses = train.binary_cross_entropy_with_mask(
            logits=logits, labels=graphs.globals, mask=mask
        )
        return jnp.sum(jnp.where(mask, losses, 0)) / jnp.sum(mask), {}

    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    return Linen(module, jax.jit(module.init)(keys, inputs), loss)


def ogbg_net(checkouts: Checkouts) -> Linen:
    """With a model of the edges and of the graph."""
    return ogbg(checkouts, "GraphNet", use_edge_model=True)


def ogbg_conv(checkouts: Checkouts) -> Linen:
    """With convolutions on the graph, and pooling."""
    return ogbg(checkouts, "GraphConvNet")
