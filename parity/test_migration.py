"""The migration guide, docs/coming-from-torch.md: both sides run, and agree.

The blocks of each side run in order, in one namespace. At the end of a recipe, values
that have the same name on both sides are compared.
"""

import functools
import re
import weakref
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from shared.guide import (
    BLOCKS,
    BOTH,
    JAMP,
    OPTAX,
    TEXT,
    TORCH,
    Block,
    rows,
)

from . import behaviors_api
from .behaviors_table import FLOAT16_TOLERANCE, TOLERANCE

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch.optim.optimizer import (  # noqa: E402
    register_optimizer_step_post_hook,
)

from . import behaviors_torch  # noqa: E402

RUN = ("model", "optimizer", "log")
# What each recipe compares: in its blocks for NNX, and in those for optax.
COMPARED = {
    ("The example", JAMP): (),
    ("Typical training", JAMP): (*RUN, "skips", "scales", "loss"),
    ("Typical training", OPTAX): ("params", "log"),
    ("Accumulate, clip, log", JAMP): (*RUN, "losses", "norms"),
    ("Schedules, groups, averages", JAMP): ("model", "optimizer"),
    ("Which dtype", JAMP): ("output", "loss", "mixed"),
    ("Parts in float32", JAMP): ("half", "full", "again"),
    ("Inference and evaluation", JAMP): ("output",),
    ("Binary cross entropy", JAMP): ("loss", "bias_grad"),
    ("Gradient penalty", JAMP): RUN,
    ("Several models, losses and optimizers", JAMP): (
        *("first", "second", "optimizer0", "optimizer1", "log"),
    ),
    ("DataParallel: one process, all its devices", JAMP): RUN,
    ("DistributedDataParallel: a process for each device", JAMP): ("params", "log"),
    ("Several inputs, or ops that autocast casts", JAMP): ("output", "loss", "grad"),
    ("Functions that need one dtype", JAMP): ("output", "loss", "grad"),
    ("Switch it on and off", JAMP): ("model", "optimizer", "loss", "scale", "state"),
    ("Save and resume", JAMP): ("model", "state", "growth_factor"),
    ("Set the scale and the factors", JAMP): ("model", "scales", "enabled"),
}
# Relative to the largest number in an array. Parameters drift apart by up to
# FLOAT16_TOLERANCE; an output may be off by one unit in the last place per layer.
TOLERANCES = {
    "output": 2 * FLOAT16_TOLERANCE,
    "mixed": 2 * FLOAT16_TOLERANCE,
    "Switch it on and off": TOLERANCE,  # float32, added in another order
}
NUMBERS = np.ndarray | np.generic


class TorchSide:
    """torch's values as plain Python and NumPy."""

    def __init__(self):
        self.steps: Any = weakref.WeakKeyDictionary()

    def count(self, optimizer: Any, *_: Any) -> None:
        self.steps[optimizer] = self.steps.get(optimizer, 0) + 1

    def plain(self, value: Any) -> Any:
        match value:
            case torch.nn.Module():
                return self.plain(value.state_dict())
            case torch.optim.Optimizer():
                return self.steps[value]
            case torch.Tensor():
                return value.detach().numpy()
            case torch.dtype():
                return str(value).removeprefix("torch.")
            case dict():
                return {key: self.plain(item) for key, item in value.items()}
            case list():
                return [self.plain(item) for item in value]
        return value


def jamp_plain(value: Any) -> Any:
    """jamp's values as plain Python and NumPy, with torch's names."""
    match value:
        case nnx.Optimizer():
            return int(value.step[...])
        case nnx.Module():
            layers = nnx.to_pure_dict(nnx.state(value)).items()
            weights = {f"{name}.weight": layer["kernel"].T for name, layer in layers}
            biases = {f"{name}.bias": layer["bias"] for name, layer in layers}
            return jamp_plain(weights | biases)
        case {"loss_scale": scale, "growth_tracker": tracker}:
            return {"scale": float(scale), "_growth_tracker": int(tracker)}
        case jax.Array():
            return np.asarray(value)
        case np.dtype():
            return value.name
        case dict():
            return {key: jamp_plain(item) for key, item in value.items()}
        case list():
            return [jamp_plain(item) for item in value]
    return value


def difference(left: Any, right: Any, tolerance: float) -> str:
    """How torch's value and jamp's differ; "" if they do not."""
    if isinstance(left, dict) and isinstance(right, dict):
        if left.keys() != right.keys() != {"scale", "_growth_tracker"}:
            return f"keys {[*left]} and {[*right]}"
        pairs = {key: (left[key], right[key]) for key in right}
    elif isinstance(left, list) and isinstance(right, list):
        if len(left) != len(right):
            return f"{len(left)} and {len(right)} items"
        pairs = dict(enumerate(zip(left, right, strict=True)))
    elif isinstance(left, NUMBERS) and isinstance(right, NUMBERS):
        return _apart(left, right, tolerance)
    else:
        same = type(left) is type(right) and left == right
        return "" if same else f"{left!r} and {right!r}"
    for key, pair in pairs.items():
        if found := difference(*pair, tolerance):
            return f"[{key!r}]: {found}"
    return ""


def _apart(left: Any, right: Any, tolerance: float) -> str:
    if (left.dtype, left.shape) != (right.dtype, right.shape):
        return f"{left.dtype} {left.shape} and {right.dtype} {right.shape}"
    finite = np.isfinite(left)
    if not np.array_equal(finite, np.isfinite(right)):
        return "one of them is not finite"
    left, right = (side[finite].astype(np.float64) for side in (left, right))
    if not left.size:
        return ""
    apart = np.abs(left - right).max() / np.abs(left).max()
    return "" if apart <= tolerance else f"{apart:.3g} apart"


def recipes(blocks: list[Block]) -> Iterator[tuple[str, list[Block]]]:
    for heading in dict.fromkeys(block.recipe for block in blocks):
        yield heading, [block for block in blocks if block.recipe == heading]


def run(blocks: list[Block]) -> Iterator[tuple[str, str, str]]:
    """Runs both sides; gives recipe, name and difference of each compared value."""
    torch_side, left, right = TorchSide(), {}, {}
    default = FLOAT16_TOLERANCE
    hook = register_optimizer_step_post_hook(torch_side.count)
    try:
        for recipe, own in recipes(blocks):
            names = {
                name for (r, _), ns in COMPARED.items() if r == recipe for name in ns
            }
            execute([b for b in own if b.title in (BOTH, TORCH)], left, names)
            for title in (JAMP, OPTAX):
                if (recipe, title) not in COMPARED:
                    continue
                execute([b for b in own if b.title in (BOTH, title)], right, names)
                for name in COMPARED[recipe, title]:
                    found = difference(
                        torch_side.plain(left["model" if name == "params" else name]),
                        jamp_plain(right[name]),
                        TOLERANCES.get(recipe) or TOLERANCES.get(name, default),
                    )
                    yield recipe, name, found
    finally:
        hook.remove()


def execute(blocks: list[Block], namespace: dict[str, Any], names: set[str]) -> None:
    """Runs blocks, which must define the values to compare."""
    for name in names:
        namespace.pop(name, None)
    for block in blocks:
        exec(compile(block.code, block.recipe, "exec"), namespace)


def _plant(block: Block) -> str:
    right, wrong = FAULTS.get(block.recipe, ("", ""))
    return block.code.replace(right, wrong) if block.title == JAMP else block.code


@pytest.fixture
def alone(tmp_path, monkeypatch):
    """A folder to write to, and the variables that torchrun sets for one process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    torchrun: Any = {
        "store": torch._C._distributed_c10d.HashStore(),
        "rank": 0,
        "world_size": 1,
    }
    init = functools.partial(dist.init_process_group, **torchrun)
    monkeypatch.setattr(dist, "init_process_group", init)


def test_both_sides_of_each_recipe_agree(alone):
    results = list(run(BLOCKS))
    wrong = [" ".join(result) for result in results if result[2]]
    assert not wrong, "\n".join(wrong)
    assert len(results) == sum(map(len, COMPARED.values()))


def test_each_recipe_is_compared():
    shown = {(block.recipe, block.title) for block in BLOCKS if block.title != TORCH}
    assert COMPARED.keys() == {
        (recipe, JAMP if title == BOTH else title) for recipe, title in shown
    }
    assert [recipe for (recipe, _), names in COMPARED.items() if not names] == [
        "The example"
    ]


FAULTS = {
    "Parts in float32": ("enabled=False", "enabled=True"),
    "Functions that need one dtype": ("@jamp.autocast(cast_inputs=jnp.float32)\n", ""),
    "Switch it on and off": ("jnp.float16, enabled=use_amp", "jnp.float16"),
}
NEEDED = ("The example", "Several inputs, or ops that autocast casts")


def test_faults_in_jamps_side_are_seen(alone):
    blocks = [block for block in BLOCKS if block.recipe in (*NEEDED, *FAULTS)]
    faulty = [block._replace(code=_plant(block)) for block in blocks]
    assert sum(old != new for old, new in zip(blocks, faulty, strict=True)) == 3
    seen = {(recipe, name) for recipe, name, found in run(faulty) if found}
    assert seen == {
        *(("Parts in float32", name) for name in ("full", "again")),
        *(
            ("Functions that need one dtype", name)
            for name in ("output", "loss", "grad")
        ),
        *(("Switch it on and off", name) for name in ("model", "loss")),
    }


def test_differences_are_seen():
    x = np.linspace(1, 2, 8, dtype=np.float32)
    state = {"scale": 8.0, "_growth_tracker": 1}
    assert not difference(
        {"x": [x, state, True]}, {"x": [x * 1.0009, state, True]}, 1e-3
    )
    assert not difference(state | {"growth_factor": 2.0}, state, 0.0)  # as with optax
    for left, right in (
        (x, x * np.float32(1.002)),
        (x, x.astype(np.float16)),
        (x, x[:7]),
        (x, np.where(x == 2, np.inf, x)),
        ([x, x], [x]),
        ({"x": x}, {"y": x}),
        (state, state | {"_growth_tracker": 2}),
        (state, state | {"scale": 8.0001}),
        (True, 1),
        ("float16", "bfloat16"),
    ):
        assert difference(left, right, 1e-3), (left, right)
        assert difference([{"x": left}], [{"x": right}], 1e-3)


CYCLES = [  # total_steps, pct_start: the peak is between two steps, or on one
    (8, 0.3),
    (20, 0.25),
    (101, 0.4),
    (2000, 0.3),
]


@pytest.mark.parametrize(("steps", "pct_start"), CYCLES)
def test_the_cycle_is_torchs_at_every_step(steps, pct_start):
    """Its rate and its beta1, while optax's schedule ends a step later."""
    optimizer = torch.optim.AdamW([torch.zeros(1, requires_grad=True)])
    cycle = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 1e-2, steps, pct_start=pct_start
    )
    seen = []
    for step in range(steps):
        seen.append((cycle.get_last_lr()[0], optimizer.param_groups[0]["betas"][0]))
        optimizer.step()
        if step < steps - 1:
            cycle.step()
    rates, betas = np.array(seen).T

    (code,) = (block.code for block in BLOCKS if "def one_cycle" in block.code)
    page: dict[str, Any] = {"jnp": jnp}
    exec(code.partition("def adamw")[0], page)
    low, count = 1e-2 / 25, jnp.arange(steps)
    rate = page["one_cycle"](low, 1e-2, low / 1e4, steps, pct_start)
    beta = page["one_cycle"](0.95, 0.85, 0.95, steps, pct_start)
    for schedule, expected in ((rate, rates), (beta, betas)):
        found = np.asarray(jax.jit(schedule)(count), np.float64)
        # A dozen operations round, and so does each number on the way to them.
        bound = 12 * np.finfo(np.float32).eps * expected.max()
        assert np.abs(found - expected).max() <= bound
    optaxs = optax.cosine_onecycle_schedule(steps, 1e-2, pct_start)
    bound = 12 * np.finfo(np.float32).eps * rates.max()
    assert np.abs(jax.vmap(optaxs)(count) - rates).max() > bound
    assert np.abs(np.asarray(optaxs(steps)) - rates[-1]) <= bound


def test_each_public_member_has_a_row():
    left = " ".join(row[0] for row in rows(TEXT, "| torch | jamp with NNX |"))
    members = {name for name in dir(torch.amp.GradScaler) if name[0] != "_"}
    assert members == set(re.findall(r"scaler\.(\w+)\(", left))
    for module in (torch.amp, torch.cuda.amp):
        hidden = {"amp_definitely_not_available"}  # asks whether there is a GPU
        for name in set(module.__all__) - hidden:
            assert f"{module.__name__}.{name}" in left
    for name in ("autocast", "is_autocast_enabled", "get_autocast_dtype"):
        assert f"torch.{name}(" in left
    for name in ("init_scale", "growth_factor", "backoff_factor", "growth_interval"):
        assert f"{name}=" in left


def test_the_messages_are_torchs():
    # The suite asks jamp the same question.
    raised = behaviors_api.messages(behaviors_torch.Driver).values()
    known = {text.removesuffix(".") for text in raised}
    table = rows(TEXT, "| message | when |")
    assert len(table) > 5
    assert {row[0].strip("`").removesuffix(".") for row in table} <= known
