"""`with_policy` for Flax Linen.

The result is the same module with another class: one whose methods run under Flax's
method interceptors, which see every call of every module inside, with its path. While
they run, each parameter lies in a box that casts it when a module reads it
(`linen_box.py`). So neither the tree of parameters nor the modules change, and lifted
transformations see the parameters as they are stored.
"""

import contextlib
import functools
import threading
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import jax
from flax import linen as nn

from .._tree import cast_floating
from .float32_for import FLOAT32_FOR
from .linen_box import box, opened, without_boxes
from .overrides import (
    COMPUTE_DTYPE,
    ROOT,
    Call,
    Place,
    Plan,
    check_all_used,
    is_scanned,
    make_plan,
    methods_of,
    pattern_of,
    place_of,
    subclass,
)
from .policy import Policy

CALLER = "jamp.linen.with_policy"


def with_policy(
    module: nn.Module,
    policy: Policy | str,
    overrides: Mapping[str | type, Policy | str] | None = None,
    *,
    float32_for: Collection[str] = FLOAT32_FOR,
) -> nn.Module:
    """The module with a policy for it and for all modules inside.

    Parameters are stored in `param_dtype` (`init` makes them so) and cast to
    `compute_dtype` when a module reads them. Each module's inputs are cast to
    `compute_dtype`, the results of the outermost one to `output_dtype`. Other
    collections, such as batch statistics, are left as they are. The tree of variables
    is that of the plain module: checkpoints load both ways.

    Overrides give other policies to modules inside, and to all that is in those, up to
    the next override. If several are for the same module, the first decides. Norms get
    a policy by themselves: they store and compute in float32 and give back what the
    modules around them compute in.

    A layer's own `dtype=` wins over its policy, as does a cast in the module's code.

    Args:
      module: a Linen module, bound or not.
      policy: a `Policy`, or a string for `get_policy`.
      overrides: maps module paths or classes to policies. A path is a regular
        expression that is searched for in names such as "encoder/Dense_0"; "^head$" is
        the outermost `head`, and "block_1" is not "block_10". A name or class stands
        for the module with all inside.
      float32_for: what stays in float32 although its policy says half precision:
        "norms" (Flax's classes and those derived from them), "softmax", "losses"
        (optax's). `()` for nothing.

    Returns:
      A module of a subclass, to be used as the plain one: `init`, `apply`, `bind`, as a
      submodule. A module that is part of another one already is changed in place.

    Raises:
      TypeError: an argument is of the wrong type.
      ValueError: the module has a policy already; a bad policy. When it is called: an
        override matches no module; the nearest paths are shown.

    Examples:
      >>> import jax, jax.numpy as jnp, flax.linen as nn, jamp
      >>> model = nn.Sequential([nn.Dense(8), nn.LayerNorm(), nn.Dense(2)])
      >>> model = jamp.linen.with_policy(model, "mixed_float16", {"layers_2": "full"})
      >>> params = model.init(jax.random.key(0), jnp.ones((1, 4)))  # float32
      >>> y, kept = model.apply(params, jnp.ones((1, 4)), capture_intermediates=True)
      >>> y.dtype, jax.tree.leaves(kept)[1].dtype
      (dtype('float32'), dtype('float16'))

    PyTorch: FSDP's `MixedPrecision` and apex's opt level O2. Keras's `DTypePolicyMap`
    maps paths in this way.
    """
    plan = make_plan(CALLER, module, nn.Module, policy, overrides, float32_for)
    if module.parent is None:
        module = module.clone(name=module.name)
    object.__setattr__(module, "__class__", policied(type(module), plan))
    return module


class Frame(NamedTuple):
    """A module that is being called."""

    run: "Run"
    module: nn.Module
    place: Place

    def is_of(self, module: nn.Module) -> bool:
        """Whether this is the module itself, or a copy that a transformation made."""
        same_class = issubclass(type(self.module), type(module))
        return same_class and self.module.path == module.path


class Run:
    """One call of a module that was given a policy."""

    def __init__(self, plan: Plan, root: tuple[str, ...], hits: set[int]):
        self.plan, self.root = plan, root
        self.hits = hits  # the overrides that matched a module, ever
        self.casts = True
        self.places: dict[str, Place] = {}  # the modules that were called

    def name(self, path: tuple[str, ...]) -> str:
        inside = path[: len(self.root)] == self.root
        return "/".join(path[len(self.root) :] if inside else path)

    def place_around(self, path: tuple[str, ...], top: Frame) -> Place:
        """The place of the module around one: that of the caller, if it is that one."""
        start, place = len(top.module.path), top.place
        if path[:start] != top.module.path:  # made elsewhere and handed on
            start, place = len(self.root), self.places[""]
        for depth in range(start + 1, len(path)):
            name = self.name(path[:depth])
            if name in self.places:
                place = self.places[name]
            else:  # not called yet, so that its class is not known
                place = place_of(self.plan, name, None, place, set())
        return place


class Frames(threading.local):
    def __init__(self):
        self.stack: list[Frame] = []


FRAMES = Frames()


@contextlib.contextmanager
def on_top(frame: Frame):
    run, path = frame.run, frame.module.path
    shared = bool(FRAMES.stack) and FRAMES.stack[-1].module.path == path
    if shared or run.name(path) not in run.places:  # nn.share_scope: the inner one's
        run.places[run.name(path)] = frame.place
    FRAMES.stack.append(frame)
    try:
        yield
    finally:
        FRAMES.stack.pop()


def intercept(next_function, args, kwargs, context):
    """Flax calls this for each method of each module."""
    module, name, top = context.module, context.method_name, FRAMES.stack[-1]
    if module.scope is None:
        return next_function(*args, **kwargs)
    if top.is_of(module):  # called by itself, or the copy that a transformation made
        FRAMES.stack[-1] = top._replace(module=module)
        try:
            return next_function(*args, **kwargs)
        finally:
            FRAMES.stack[-1] = top
    if hasattr(type(module), "_jamp_plan") or not hasattr(type(module), name):
        # It has a policy of its own, or is what a transformation calls a function with.
        return next_function(*args, **kwargs)
    run = top.run
    around = run.place_around(module.path, top)
    place = place_of(run.plan, run.name(module.path), module, around, run.hits)
    with on_top(Frame(run, module, place)):
        if not run.casts:
            return next_function(*args, **kwargs)
        if name == "setup" or (name.startswith("_") and name != "__call__"):
            with COMPUTE_DTYPE(place.policy.compute_dtype):  # arguments stay
                return next_function(*args, **kwargs)
        boundary = place != top.place
        loops = name == "__call__" and is_scanned(module, top.module)
        call = Call(run.plan, place, top.place, boundary, module, name, loops)
        if isinstance(module, nn.WeightNorm | nn.SpectralNorm) and name == "__call__":
            next_function = functools.partial(with_open_boxes, module)
        return call.run(next_function, args, kwargs)


def with_open_boxes(module, *args, **kwargs):
    """Calls a module that names parameters by their paths in the tree of variables."""

    def run(module, *args, **kwargs):
        return module(*args, **kwargs)

    initializing = module.is_initializing()
    run = nn.map_variables(run, "params", trans_in_fn=opened, mutable=initializing)
    return run(module, *args, **kwargs)


@functools.cache
def policied(base: type, plan: Plan) -> type:
    """A subclass whose methods run under a policy."""
    hits: set[int] = set()

    def governed(name, function):
        @nn.nowrap  # or Flax would run setup with the parameters as they are stored
        def method(self, *args, **kwargs):
            top = FRAMES.stack[-1] if FRAMES.stack else None
            if self.scope is None or (top is not None and top.is_of(self)):
                return function(self, *args, **kwargs)
            return run_root(
                self, name, function, Run(plan, self.path, hits), args, kwargs
            )

        functools.update_wrapper(method, function, updated=())
        return method

    def translated(name):
        function = getattr(nn.Module, name)

        @nn.nowrap
        def method(self, *args, **kwargs):
            given = kwargs.get("method")
            given = getattr(given, "__func__", given)
            if isinstance(given, str) and given not in methods:
                given = getattr(base, given, given)
            known = getattr(given, "__name__", "")
            if callable(given) and given is not vars(made).get(known):
                # Model.encode, a private method, or a function of the module.
                kwargs["method"] = governed(known, given)
            return function(self, *args, **kwargs)

        functools.update_wrapper(method, function, updated=())
        return method

    methods = methods_of(base, nn.Module)
    methods = {n: f for n, f in methods.items() if n not in base.__dataclass_fields__}
    namespace: dict[str, Any] = {"_jamp_plan": plan}
    namespace |= {name: governed(name, f) for name, f in methods.items()}
    namespace |= {n: translated(n) for n in ("apply", "init", "init_with_output")}
    made = subclass(base, namespace, (policied, (base, plan)))
    return made


def run_root(module, name, function, run: Run, args, kwargs):
    """Calls a method of the module that was given the policy."""
    initializing = module.is_initializing()
    run.casts = not initializing
    if initializing and name == "__call__":
        run.hits.clear()  # of other models of the class
    place = place_of(run.plan, "", module, Place(run.plan.policy, ROOT), run.hits)
    caller = FRAMES.stack[-1].place if FRAMES.stack else None

    def inside(module, *args, **kwargs):
        bound = functools.partial(function, module)
        if not run.casts:  # makes the parameters, as the plain module does
            out = bound(*args, **kwargs)
            run.casts = True
            return out
        call = Call(run.plan, place, caller, True, module, name)
        return call.run(bound, args, kwargs)

    def store(variables):
        return jax.tree_util.tree_map_with_path(
            lambda path, x: cast_floating(x, stored_dtype(run, path)),
            without_boxes(variables),
        )

    mapped = nn.map_variables(
        inside,
        "params",
        trans_in_fn=box,
        trans_out_fn=store,
        mutable=module.is_mutable_collection("params"),
        init=initializing,  # then it runs again with casts, and makes the other state
    )
    with contextlib.ExitStack() as contexts:
        if caller is None:  # else the interceptor is there already
            contexts.enter_context(nn.intercept_methods(intercept))
        contexts.enter_context(on_top(Frame(run, module, place)))
        contexts.enter_context(COMPUTE_DTYPE(place.policy.compute_dtype))  # for setup
        out = mapped(module, *args, **kwargs)
    if name == "__call__":
        check_used(module, run, initializing)
    return out


def stored_dtype(run: Run, path) -> Any:
    """The param dtype of the module that a parameter belongs to."""
    names = [key.key for key in path if isinstance(key, jax.tree_util.DictKey)][1:]
    for depth in range(len(names), -1, -1):
        if (place := run.places.get("/".join(names[:depth]))) is not None:
            return place.policy.param_dtype
    return run.plan.policy.param_dtype


def check_used(module, run: Run, initializing: bool):
    """Raises for an override that matches no module, as far as this call can tell.

    `init` calls all modules. Another call may pass some by, so there only paths are
    held against those of the variables, and what ever matched is remembered.
    """
    paths = set(run.places)
    for tree in module.variables.values():
        for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]:
            names = [k.key for k in path if isinstance(k, jax.tree_util.DictKey)]
            paths |= {"/".join(names[:depth]) for depth in range(len(names))}
    for index, (key, _) in enumerate(run.plan.overrides):
        if isinstance(key, str):
            if any(map(pattern_of(key).search, paths)):
                run.hits.add(index)
        elif not initializing:
            run.hits.add(index)
    check_all_used(CALLER, run.plan, run.hits, paths)
