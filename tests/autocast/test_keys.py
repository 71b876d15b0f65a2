"""Keys of rules: one look-alike for each kind of key, which the rule must not match.

A key that cannot be told apart from its look-alike is refused.
"""

import functools
import inspect
import itertools
import pickle
import types
from importlib.util import find_spec

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

import jamp
from shared.jaxprs import equations
from shared.keras_on_jax import import_keras
from tests.marks import cover

HALF, FLOAT32 = jnp.float16, jnp.float32
X = np.ones((4, 4), np.float32)
pytestmark = pytest.mark.usefixtures("standard_promotion")


def ones():
    return jnp.asarray(X)


class Part(nnx.Module):
    """An NNX module with a child that has a `__call__` of its own."""

    def __init__(self, rngs):
        self.layer = nnx.Linear(4, 4, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return self.layer(x)


class Inherits(Part):
    pass


class Calls(Part):
    def __call__(self, x):
        return super().__call__(x)


class NnxHead(nnx.Linear):
    pass


class OwnNnxHead(nnx.Linear):
    def __call__(self, x):
        return super().__call__(x)


class LinenHead(nn.Dense):
    pass


class OwnLinenHead(nn.Dense):
    @nn.compact
    def __call__(self, x):
        return super().__call__(x)


class EqxHead(eqx.nn.Linear):
    pass


class OwnEqxHead(eqx.nn.Linear):
    def __call__(self, x):
        return super().__call__(x)


class HaikuHead(hk.Linear):
    pass


class OwnHaikuHead(hk.Linear):
    def __call__(self, x):
        return super().__call__(x)


def product(x):
    return x @ x


def method(self, x):
    return x @ x


class Assigned:
    __call__ = method


class Twin:
    __call__ = method


class Named:
    """Written in the class under another name, as in code that comes from torch."""

    def forward(self, x):
        return x @ x

    __call__ = forward


class NoFunction:
    __call__ = len


class Silent:
    def forward(self, x):
        return x @ x


class Heads:
    def head(self, x):
        return x @ x

    @classmethod
    def make(cls, x):
        return x @ x

    @staticmethod
    def plain(x):
        return x @ x


class MoreHeads(Heads):
    pass


def made_for(size):
    class Layer:
        def __init__(self):
            self.size = size

        def __call__(self, x):
            return x @ x

    return Layer


def normed(base):
    class Normed(base):
        def __call__(self, x):
            return super().__call__(x)

    return Normed


def in_file(name, text="def head(x):\n    return x @ x\n", key="head"):
    """What a file of this name defines."""
    module = types.ModuleType(name)
    exec(compile(text, f"{name}.py", "exec"), vars(module))
    return vars(module)[key]


CLASS_TEXT = "class Head:\n    def __call__(self, x):\n        return x @ x\n"


def zeros(make):
    """What a function makes, with zeros as its arrays: nothing is drawn."""
    return jax.tree.map(
        lambda x: jnp.asarray(np.zeros(x.shape, x.dtype)), jax.eval_shape(make)
    )


def of_linen(make):
    model = make(4, use_bias=False)
    variables = zeros(lambda: model.init(jax.random.key(0), X))
    return lambda x: model.apply(variables, x)


def of_haiku(make):
    model = hk.transform(lambda x: make(4, with_bias=False)(x))
    params = zeros(lambda: model.init(jax.random.key(0), X))
    return lambda x: model.apply(params, None, x)


def of_nnx(make):
    return make(
        4, 4, use_bias=False, kernel_init=nnx.initializers.zeros, rngs=nnx.Rngs(0)
    )


def of_part(make):
    part = make(nnx.Rngs(0))
    part.layer = of_nnx(nnx.Linear)
    return part


def equinox_layer(make, *sizes):
    made = lambda: make(*sizes, use_bias=False, key=jax.random.key(0))
    arrays = zeros(lambda: eqx.filter(made(), eqx.is_array))
    return eqx.combine(arrays, eqx.filter_eval_shape(made))


def of_eqx(make):
    return jax.vmap(equinox_layer(make, 4, 4))


def image(make):
    """A convolution of Equinox, on as many dimensions as it has."""
    layer = equinox_layer(make, 4, 4, 3)
    shape = (4,) * (1 + layer.num_spatial_dims)
    return lambda x: layer(jnp.ones(shape, x.dtype))


def linen_image(make):
    """A convolution of Linen on a sequence."""
    layer, images = make(4, (3,), use_bias=False), np.ones((2, 4, 4), np.float32)
    variables = zeros(lambda: layer.init(jax.random.key(0), images))
    return lambda x: layer.apply(variables, jnp.asarray(images, x.dtype))


def haiku_image(make):
    images = np.ones((2,) + (4,) * (3 if make is hk.Conv2D else 2), np.float32)
    model = hk.transform(lambda x: make(4, 3, with_bias=False)(x))
    params = zeros(lambda: model.init(jax.random.key(0), images))
    return lambda x: model.apply(params, None, jnp.asarray(images, x.dtype))


def scoped(name):
    def run(x):
        with jax.named_scope(name):
            return x @ x

    return run


def multiplying_by(n):
    def closure(x):
        return x @ x * n

    def with_default(x, n=n):
        return x @ x * n

    return closure, with_default


LAMBDAS = [lambda x: x @ x, lambda x: x @ x]
CLASSES = made_for(1), made_for(2)
MIXED = normed(Assigned), normed(Twin)
FILES = in_file("one"), in_file("two")
CLASS_FILES = [in_file(name, CLASS_TEXT, "Head") for name in ("one", "two")]
# A key, and what makes what it is for and its look-alike. None: the key is refused.
PAIRS = {
    "nnx, own call": (OwnNnxHead, lambda: (of_nnx(OwnNnxHead), of_nnx(nnx.Linear))),
    "nnx, inherited call": (NnxHead, lambda: (of_nnx(NnxHead), of_nnx(nnx.Linear))),
    "nnx, child with a call": (Calls, lambda: (of_part(Calls), of_part(Part))),
    "nnx, child without": (Inherits, lambda: (of_part(Inherits), of_part(Part))),
    "linen, own call": (
        OwnLinenHead,
        lambda: (of_linen(OwnLinenHead), of_linen(nn.Dense)),
    ),
    "linen, inherited call": (
        LinenHead,
        lambda: (of_linen(LinenHead), of_linen(nn.Dense)),
    ),
    "linen, a library's": (
        nn.Conv,
        lambda: (linen_image(nn.Conv), linen_image(nn.ConvLocal)),
    ),
    "equinox, own call": (
        OwnEqxHead,
        lambda: (of_eqx(OwnEqxHead), of_eqx(eqx.nn.Linear)),
    ),
    "equinox, inherited call": (
        EqxHead,
        lambda: (of_eqx(EqxHead), of_eqx(eqx.nn.Linear)),
    ),
    "equinox, a library's": (
        eqx.nn.Conv2d,
        lambda: (image(eqx.nn.Conv2d), image(eqx.nn.Conv1d)),
    ),
    "haiku, own call": (
        OwnHaikuHead,
        lambda: (of_haiku(OwnHaikuHead), of_haiku(hk.Linear)),
    ),
    "haiku, inherited call": (
        HaikuHead,
        lambda: (of_haiku(HaikuHead), of_haiku(hk.Linear)),
    ),
    "haiku, a library's": (
        hk.Conv2D,
        lambda: (haiku_image(hk.Conv2D), haiku_image(hk.Conv1D)),
    ),
    "class without a call": (Silent, None),
    "haiku class without a call": (hk.Module, None),
    "class without a function": (NoFunction, None),
    "class with a function's": (Assigned, lambda: (Assigned(), Twin())),
    "classes of one function": (CLASSES[0], lambda: [make() for make in CLASSES]),
    "classes with other bases": (MIXED[0], lambda: [make() for make in MIXED]),
    "classes of two files": (CLASS_FILES[0], lambda: [make() for make in CLASS_FILES]),
    "functions of two files": (FILES[0], lambda: FILES),
    "jitted functions of two files": (FILES[0], lambda: map(jax.jit, FILES)),
    "jitted key": (jax.jit(FILES[0]), lambda: FILES),
    "checkpointed key": (jax.checkpoint(FILES[0]), lambda: FILES),
    "closure": (multiplying_by(2)[0], None),
    "jitted closure": (jax.jit(multiplying_by(2)[0]), None),
    "default value": (jax.checkpoint(multiplying_by(2)[1]), None),
    "jitted lambda": (jax.jit(LAMBDAS[0]), None),
    "lambdas of one line": (LAMBDAS[0], None),
    "partial": (functools.partial(jnp.dot, X), None),
    "partial of JAX": (jax.tree_util.Partial(jnp.dot, X), None),
    "bound method": (Heads().head, None),
    "method": (Heads.head, lambda: (Heads().head, Heads.make)),
    "class method": (Heads.make, lambda: (Heads.make, Heads().head)),
    "inherited class method": (MoreHeads.make, None),
    "static method": (Heads.plain, lambda: (Heads.plain, Heads.make)),
    "primitive": (lax.dot_general_p, lambda: (product, jnp.negative)),
    "path": ("^head$", lambda: (scoped("head"), scoped("overhead"))),
    "path with a number": (
        "block_1",
        lambda: (scoped("block_1"), scoped("block_11")),
    ),
    "path from a number on": (
        "1/mlp",
        lambda: (scoped("blocks/1/mlp"), scoped("blocks/11/mlp")),
    ),
}


def in_region(function, rules=None):
    def run(x):
        with jamp.autocast(HALF, rules=rules):
            return function(x)

    return run


@pytest.mark.parametrize("name", PAIRS)
def test_a_rule_does_not_match_a_look_alike(name):
    key, make = PAIRS[name]
    if make is None:
        with pytest.raises(ValueError, match=r"is known by .*code"):
            jamp.autocast(HALF, rules={key: FLOAT32})
        return
    run, look_alike = make()
    plain = jax.eval_shape(in_region(look_alike), X).dtype
    for wrap in (lambda f: f, lambda f: jax.jit(lambda x: f(x))):  # a jit inside
        for functions in ((run, look_alike), (look_alike, run)):
            both = lambda x, wrap=wrap, fs=functions: [wrap(f)(x) for f in fs]
            found = jax.eval_shape(in_region(both, {key: FLOAT32}), X)
            found = dict(zip(functions, (y.dtype for y in found), strict=True))
            assert (found[run], found[look_alike]) == (FLOAT32, plain), name


def test_regions_with_look_alikes_share_no_cache():
    """What a region makes of a jitted function is kept by its rules."""
    both = jax.jit(lambda x: (FILES[0](x), FILES[1](x)))
    for i in (0, 1, 0):
        with jamp.autocast(HALF, rules={FILES[i]: FLOAT32}):
            dtypes = [y.dtype for y in both(ones())]
        assert (dtypes[i], dtypes[1 - i]) == (FLOAT32, HALF)


# Classes, and those derived from them with a `__call__` that calls no other.
class Base:
    def __call__(self, x):
        return x @ x


class Derived(Base):
    def __call__(self, x):
        return x @ x + 1


class MoreDerived(Derived):
    pass


class Left(Base):
    pass


class Right(Base):
    def __call__(self, x):
        return 2 * super().__call__(x)


class Both(Left, Right):
    pass


class LinenConv(nn.Conv):
    @nn.compact
    def __call__(self, x):
        return x @ self.param("w", nn.initializers.ones, (4, 4))


class LinenStep(nn.Module):
    """A convolution in the body of a loop over layers."""

    @nn.compact
    def __call__(self, x, _):
        return nn.Conv(4, (3,), use_bias=False)(x), None


def linen_layers():
    layers = nn.scan(LinenStep, {"params": 0}, split_rngs={"params": True}, length=2)()
    variables = zeros(lambda: layers.init(jax.random.key(0), X, None))
    return lambda x: layers.apply(variables, x, None)[0]


class EqxConv(eqx.nn.Conv1d):
    def __call__(self, x, *, key=None):
        return self.weight[:, :, 0] @ x


class HaikuConv(hk.Conv1D):
    def __call__(self, x):
        return x @ hk.get_parameter("w", (4, 4), init=jnp.ones)


def keras_head(inherits):
    """A class of Keras as key, and an object of one that is derived from it."""
    keras = import_keras()

    class KerasHead(keras.layers.Dense):
        pass

    class OwnKerasHead(keras.layers.Dense):
        def call(self, x):
            return keras.ops.matmul(x, self.kernel)

    make = KerasHead if inherits else OwnKerasHead
    layer = keras.Sequential([make(4, use_bias=False)])
    layer.build((4, 4))
    values = [variable.value for variable in layer.variables]
    return keras.layers.Dense, lambda x: layer.stateless_call(values, [], x)[0]


# What makes a class as key, and an object of one that is derived from it.
DERIVED = {
    "plain": lambda: (Base, Derived()),
    "nnx": lambda: (nnx.Linear, of_nnx(OwnNnxHead)),
    "linen, remat of a subclass": lambda: (nn.Conv, linen_image(nn.remat(LinenConv))),
    "equinox": lambda: (eqx.nn.Conv1d, image(EqxConv)),
    "haiku": lambda: (hk.Conv1D, haiku_image(HaikuConv)),
    "linen, scan": lambda: (nn.Conv, linen_layers()),
    "nnx, inherited call": lambda: (nnx.Linear, of_nnx(NnxHead)),
    "linen": lambda: (nn.Conv, linen_image(LinenConv)),
    "linen, remat": lambda: (nn.Conv, linen_image(nn.remat(nn.Conv))),
}
if find_spec("keras") is not None:  # it is in the extras parity and ecosystem
    DERIVED |= {
        "keras": lambda: keras_head(inherits=False),
        "keras, inherited call": lambda: keras_head(inherits=True),
    }


def test_the_key_of_a_subclass_comes_first():
    value = {Base: FLOAT32, Derived: HALF, MoreDerived: jnp.bfloat16, "": HALF}
    for order in itertools.permutations((Base, Derived, MoreDerived)):
        rules = {key: value[key] for key in (*order, "")}
        with jamp.autocast(HALF, rules=rules):
            dtypes = [make()(ones()).dtype for make in (Base, Derived, MoreDerived)]
            product(ones())
        assert dtypes == [FLOAT32, HALF, jnp.bfloat16]


def test_a_class_that_gets_a_call_is_used_as_before():
    signature = inspect.signature(hk.Conv2D.__call__)
    for _ in range(2):
        region = jamp.autocast(HALF, rules={hk.Conv2D: FLOAT32, Left: None})
        copied = pickle.loads(pickle.dumps(region))
        assert copied.settings == region.settings
    assert inspect.signature(hk.Conv2D.__call__) == signature
    assert float(Both()(ones())[0, 0]) == 2 * 4  # `Right` comes after `Left`


def test_a_class_that_a_test_makes_is_a_key():
    for _ in range(2):  # another class each time, of the same statement

        class Head(nnx.Linear):
            def __call__(self, x, *, train=False):
                return super().__call__(x)

        with jamp.autocast(HALF, rules={Head: FLOAT32}):
            dtypes = [of_nnx(cls)(ones()).dtype for cls in (Head, nnx.Linear)]
        assert dtypes == [FLOAT32, HALF]


def test_an_object_that_holds_a_function_is_no_key():
    class Layer(eqx.Module):
        fun: object
        func: object

    key = Layer(jax.nn.relu, jax.nn.relu)
    with pytest.raises(ValueError, match="a key of type Layer is not one of"):
        jamp.autocast(HALF, rules={key: FLOAT32})


def test_a_class_of_named_scopes_is_that_of_the_user():
    net = jamp.nnx.named_scopes(nnx.Sequential(Calls(nnx.Rngs(0)), Part(nnx.Rngs(0))))
    calls, part = net.layers
    with jamp.autocast(HALF, rules={type(calls): FLOAT32}):
        assert (calls(ones()).dtype, part(ones()).dtype) == (FLOAT32, HALF)


def exp_in_scope(x):
    with jax.named_scope("head"):
        return jnp.exp(x)


# Rules, a function, and the rules that did nothing.
UNUSED = {
    "no such path": ({"decoder": FLOAT32}, product, "'decoder'"),
    "a loop, and not what it calls": (
        {lax.scan_p: FLOAT32},
        lambda x: lax.map(jnp.sin, x),
        "'scan'",
    ),
    "after a path": ({"head": FLOAT32, lax.exp_p: HALF}, exp_in_scope, "'exp'"),
    "after a function around": (
        {exp_in_scope: FLOAT32, "head": HALF},
        exp_in_scope,
        "'head'",
    ),
    "after a subclass": ({Base: FLOAT32, Derived: HALF}, Derived(), "'Base'"),
    "inside a function of the tables": (
        {jax.nn.softmax: HALF, lax.exp_p: FLOAT32},
        jax.nn.softmax,
        "'exp'",
    ),
    "float8 of no product": ({"head": "float8"}, exp_in_scope, "'head'"),
    "float8 of a convolution": (
        {lax.conv_general_dilated_p: "float8"},
        lambda x: lax.conv(x[None, None], x[None, None], (1, 1), "SAME"),
        "'conv_general_dilated'",
    ),
    "after one for float8": (
        {"head": "float8", "he": HALF, lax.dot_general_p: None},
        lambda x: exp_in_scope(x @ x),
        "'head', 'he'",
    ),
    "several": (
        {"head": FLOAT32, lax.exp_p: HALF, "decoder": HALF, "encoder": HALF},
        exp_in_scope,
        "'exp', 'decoder', 'encoder'",
    ),
}


@pytest.mark.parametrize("name", UNUSED)
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_rules_that_did_nothing_are_named(name, wrap):
    rules, function, names = UNUSED[name]
    run = wrap(function)
    for _ in range(2):  # the second time from caches
        message = rf"^autocast\(rules=...\): no op matched {names}, or an earlier rule "
        with pytest.raises(ValueError, match=message):
            with jamp.autocast(HALF, rules=rules):
                run(ones())


def test_a_rule_that_decides_anywhere_is_used():
    run = jax.jit(lambda x: (exp_in_scope(x), jnp.exp(x)))
    for _ in range(2):  # the second time from caches
        with jamp.autocast(HALF, rules={"head": FLOAT32, lax.exp_p: HALF}):
            assert [y.dtype for y in run(ones())] == [FLOAT32, HALF]


def scanned(f):
    return lambda x: lax.scan(lambda c, x: (c, f(x)), 0, x[None])[1][0]


def repeated(f):
    body = lambda carry: (carry[0] + 1, jnp.float32(f(carry[1])))
    return lambda x: lax.while_loop(lambda carry: carry[0] < 2, body, (0, x))[1]


CALLED = {
    "nothing": lambda f: f,
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "jit of checkpoint": lambda f: jax.jit(jax.checkpoint(f)),
    "scan": scanned,
    "map": lambda f: lambda x: lax.map(f, x[None])[0],
    "cond": lambda f: lambda x: lax.cond(x[0, 0] > 0, f, f, x),
    "while": repeated,
    "vmap of jit": lambda f: lambda x: jax.vmap(jax.jit(f))(x[None])[0],
}


CLASS_KEYS = DERIVED | {
    name: lambda key=key, make=make: (key, next(iter(make())))
    for name, (key, make) in PAIRS.items()
    if isinstance(key, type) and make is not None
}
AROUND = {
    "nothing": lambda f: f,
    "jit": jax.jit,
    "grad": jax.grad,
    "vmap": lambda f: lambda x: jax.vmap(f)(x[None]),
    "checkpoint": jax.checkpoint,
    "scan": scanned,
}


PLACES = [  # inside and outside of the region; JAX has no derivative of a `while`
    (inside, outside)
    for inside, outside in itertools.product(CALLED, AROUND)
    if (inside, outside) != ("while", "grad")
]
class_key = functools.cache(lambda name: CLASS_KEYS[name]())


@cover(quick=9, ci=240)
@pytest.mark.parametrize("name", CLASS_KEYS)
@pytest.mark.parametrize("place", PLACES, ids=str)
def test_a_class_is_known_wherever_jax_traces_it(name, place):
    """Also where a loop, a `jit` or a `checkpoint` in the region traces it apart."""
    (key, run), (inside, outside) = class_key(name), place
    total = lambda x: jnp.sum(x) + jnp.sum(jnp.float32(run(X + jnp.sum(x))))
    inner = CALLED[inside](lambda x: x + total(x))
    region = jamp.autocast(jnp.bfloat16, rules={key: FLOAT32})
    program = AROUND[outside](region(lambda x: jnp.sum(inner(x))))
    products = [e for e in equations(jax.make_jaxpr(program)(X)) if is_product(e)]
    assert {str(e.invars[0].aval.dtype) for e in products} == {"float32"}


def is_product(eqn):
    return eqn.primitive.name in ("dot_general", "conv_general_dilated")


def keyed(called, x):
    return called(x)


def other(called, x):
    return called(x)


def dtypes_of_products(function, **region):
    def run(x):
        with jamp.autocast(**region):
            return function(x)

    jaxpr = jax.make_jaxpr(run)(jnp.ones((16, 16)))
    found = (e for e in equations(jaxpr) if e.primitive.name == "dot_general")
    return [str(e.invars[0].aval.dtype) for e in found]


@pytest.mark.parametrize("name", CALLED)
def test_a_rule_for_a_function_holds_in_what_it_calls(name):
    """JAX traces these apart from their callers. Another caller has no rule."""
    called = CALLED[name](lambda x: lax.dot(x, x))
    region = {"dtype": jnp.bfloat16}
    for value, dtype in [(FLOAT32, "float32"), (HALF, "float16")]:
        rules = {keyed: value}
        for order in ((keyed, other), (other, keyed)):
            both = lambda x, order=order: [f(called, x) for f in order]
            found = dtypes_of_products(both, rules=rules, **region)
            ours = order.index(keyed)
            half = len(found) // 2
            parts = found[:half], found[half:]
            assert {*parts[ours]} == {dtype} and {*parts[1 - ours]} == {"bfloat16"}
    if name != "while":  # what a loop carries is no weight
        run = functools.partial(keyed, called)
        found = dtypes_of_products(run, rules={keyed: "float8"}, **region)
        assert {*found} == {"float8_e4m3fn"}


def test_a_call_that_is_a_method_of_its_own_class():
    """`__call__ = forward` is written in the class: no other one runs its code."""
    with jamp.autocast(HALF, rules={Named: FLOAT32}):
        assert Named()(ones()).dtype == FLOAT32
        assert product(ones()).dtype == HALF


@pytest.mark.parametrize("cls", (nn.Conv, nnx.LoRALinear, hk.Conv2D, eqx.nn.Conv2d))
def test_a_call_of_a_class_that_is_a_key_can_be_pickled(cls):
    jamp.autocast(HALF, rules={cls: FLOAT32})
    assert pickle.loads(pickle.dumps(cls.__call__)) is cls.__call__
