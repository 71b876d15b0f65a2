"""`python -m jamp`: versions, devices, and one training step in each precision.

The exit status is 1 if autocast does not work.
"""

import contextlib
import math
import platform
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

import jamp
from jamp import _targets
from jamp._tree import PyTree

# The table of docs/libraries.md, which a run of all tests writes.
TESTED = "0.10.0 0.10.1 0.10.2 0.11.0 0.11.1 0.11.2 0.12.0 0.12.0.1".split()
NEEDED = ("jaxlib", "flax", "optax", "numpy")
OPTIONAL = ("equinox", "dm-haiku")
MEASURE = """To measure what each precision brings here, run in a clone of jamp: \
python -m benchmarks.measure"""
# What `pip install jamp` installs; it overwrites the files of jmp.
OTHER = (
    "warning: jamp {} from PyPI is installed too. It is another project, a fork of "
    "jmp, and is imported as jmp. To remove it: pip uninstall jamp"
)
SHADOWED = "warning: pip installed another jamp, in {}, which this one hides"
RATE = 0.1
SIZE = 16  # float8 takes sizes that are multiples of 16
CLOSE = 0.01  # float16 rounds to 0.1%; products in float8 differ by more
# Besides float16, with a loss scale: what a program has, and how far its step may be.
PRECISIONS = {
    "bfloat16": (jnp.bfloat16, "bf16", 0.05),
    "scaled float16": (jamp.ScaledFloat16(), "f16", CLOSE),
    "float8": ("float8", "f8_e4m3", 0.2),
}


def main() -> int:
    print("\n".join(versions()))
    try:
        print("\n".join(devices()))
        print(f"float16: works; {float16_step()}")
    except Exception as error:
        print(f"autocast: does not work here; {said(error)}")
        return 1
    for name, row in PRECISIONS.items():
        try:
            print(f"{name}: works; {step_in(*row)}")
        except Exception as error:
            print(f"{name}: does not work here; {said(error)}")
    print(MEASURE)
    return 0


def versions() -> list[str]:
    """Versions of jamp, Python, what jamp needs, and other libraries that are here."""
    here = Path(jamp.__file__).parent
    kind = "a tested" if jax.__version__ in TESTED else "not a tested"
    lines = [
        f"jamp {jamp.__version__}, in {here}",
        f"Python {platform.python_version()} on {platform.platform()}",
        f"jax {jax.__version__}, {kind} release ({TESTED[0]} to {TESTED[-1]})",
    ]
    others = []
    for name in (*NEEDED, *OPTIONAL):
        try:
            others.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            if name in NEEDED:
                others.append(f"{name}: not installed")
    lines.append(", ".join(others))
    with contextlib.suppress(PackageNotFoundError):
        lines.append(OTHER.format(version("jamp")))  # this one is jamp-jax
    with contextlib.suppress(PackageNotFoundError):
        installed = Path(str(distribution("jamp-jax").locate_file("jamp")))
        if installed.is_dir() and installed.resolve() != here.resolve():
            lines.append(SHADOWED.format(installed))
    return lines


def devices() -> list[str]:
    """The backend that JAX chooses, and how many devices of which kind it has."""
    kinds = [device.device_kind for device in jax.devices()]
    counted = [f"{kinds.count(kind)} x {kind}" for kind in sorted({*kinds})]
    units = {d.device_kind: _targets.said_of_units(d) for d in jax.devices()}
    return [
        f"backend: {jax.default_backend()}",
        f"devices: {', '.join(counted)}",
        *(f"{kind}: {said}" for kind, said in units.items()),
    ]


def float16_step() -> str:
    """Trains two jitted steps in float16, the second of which overflows."""
    tx = jamp.dynamic_loss_scale(optax.sgd(RATE))

    @jax.jit
    def step(
        params: PyTree, opt_state: optax.OptState, x: jax.Array
    ) -> tuple[PyTree, optax.OptState, jax.Array, jax.Array]:
        grad_fn = jamp.value_and_grad(loss_in(jnp.float16), opt_state, has_aux=True)
        (loss, product), grads = grad_fn(params, x)
        params, opt_state = jamp.step(tx, grads, opt_state, params)
        return params, opt_state, loss, product

    x, first = batch()
    trained, opt_state, loss, product = step(first, tx.init(first), x)
    expected, _ = gradients_in(None)(first, x)
    expect(product.dtype == jnp.float16, f"the product is {product.dtype}, not float16")
    expect(trained["w"].dtype == jnp.float32, f"parameters are {trained['w'].dtype}")
    off = distance(trained["w"] - first["w"], -RATE * expected["w"])
    expect(off < CLOSE, f"the step differs from float32's by {off:.2g}")

    before = float(jamp.loss_scale(opt_state))
    held, opt_state, _, _ = step(trained, opt_state, x * 1e6)
    after = float(jamp.loss_scale(opt_state))
    expect(
        after == before / 2, f"an overflow took the scale from {before:g} to {after:g}"
    )
    expect(
        bool(jnp.array_equal(held["w"], trained["w"])), "an overflow was not skipped"
    )
    return (
        f"a jitted step multiplied in float16 (loss {float(loss):.4f}, {off:.2%} from "
        f"float32's step), and one that overflowed was skipped "
        f"(loss scale {before:g} to {after:g})"
    )


def step_in(dtype: DTypeLike | jamp.ScaledFloat16, text: str, close: float) -> str:
    """Takes a training step without a loss scale: what came out.

    Args:
      text: what the step's program has, if products run in the precision.
      close: how far the step may be from float32's.

    Raises:
      RuntimeError: it is not what should come out.
    """
    x, params = batch()
    grad_fn = gradients_in(dtype)
    has_text = f":{text}" in str(jax.make_jaxpr(grad_fn)(params, x))
    expect(has_text, f"nothing is in {text}")
    grads, _ = grad_fn(params, x)
    expected, _ = gradients_in(None)(params, x)
    off = distance(grads["w"], expected["w"])
    expect(off < close, f"the step differs from float32's by {off:.2g}")
    return f"its step differs by {off:.2%} from float32's"


def loss_in(
    dtype: DTypeLike | jamp.ScaledFloat16 | None,
) -> Callable[[PyTree, jax.Array], tuple[jax.Array, jax.Array]]:
    """A loss whose product runs in a dtype, beside that product; None: no autocast."""

    def loss_fn(params: PyTree, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        with jamp.autocast(dtype or jnp.float16, enabled=dtype is not None):
            product = x @ params["w"]
            return jnp.mean(jnp.square(jnp.tanh(product) + product - 1)), product

    return loss_fn


def gradients_in(
    dtype: DTypeLike | jamp.ScaledFloat16 | None,
) -> Callable[[PyTree, jax.Array], tuple[PyTree, jax.Array]]:
    return jax.jit(jax.grad(loss_in(dtype), has_aux=True))


def batch() -> tuple[jax.Array, dict[str, jax.Array]]:
    x, w = jax.random.normal(jax.random.key(0), (2, SIZE, SIZE))
    return x, {"w": w / math.sqrt(SIZE)}


def distance(found: jax.Array, expected: jax.Array) -> float:
    """The norm of the difference, relative to the norm of what is expected."""
    return float(jnp.linalg.norm(found - expected) / jnp.linalg.norm(expected))


def expect(holds: bool, text: str) -> None:
    if not holds:
        raise RuntimeError(text)


def said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    sys.exit(main())
