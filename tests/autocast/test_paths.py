"""Regular expressions for module paths: a number at an end is whole."""

import jax
import jax.numpy as jnp

import jamp
from jamp._autocast.paths import path_pattern
from tests.marks import walk


@walk(
    "key, path, expected",
    [
        ("block_1", "Model/block_1/Dense_0", True),
        ("block_1", "Model/block_1", True),
        ("block_1", "Model/block_10/Dense_0", False),
        ("block_1", "block_10/block_1", True),
        ("blocks/1", "blocks/12/attention", False),
        ("block_1|block_10", "block_10", True),
        ("block_1|head", "block_10", False),
        ("block_(1|2)", "block_10", False),
        ("block_[13]", "block_13", False),
        ("block_[13]", "block_3", True),
        ("block_1$", "block_11", False),
        ("block_1$", "deep_block_1", True),
        ("1/mlp", "blocks/1/mlp", True),
        ("1/mlp", "blocks/11/mlp", False),
        ("1/mlp", "11/mlp/1/mlp", True),
        ("1", "blocks/10", False),
        ("1", "blocks/21", False),
        ("0", "blocks/101", False),
        ("(0|1)/mlp", "blocks/10/mlp", False),
        ("block_", "block_10", True),
        ("block_.", "block_10", False),
        (r"block_\d", "block_10", False),
        (r"block_\d+", "block_10", True),
        ("block_[0-9]", "block_1", True),
        ("block_1?", "block_10", True),
        ("block_1.*", "block_10", True),
        ("block_1/", "block_1/Dense_0", True),
        ("[0-9]+/mlp", "blocks/10/mlp", True),
        (".*1/mlp", "blocks/11/mlp", True),
        ("[0-9]", "blocks/101", False),
        ("(?i:BLOCK_1)", "block_1", True),
        ("(?i:BLOCK_1)", "block_10", False),
        (r"(\w)_\1", "a_a1", True),
        ("", "", True),
    ],
)
def test_a_number_at_an_end_is_whole(key, path, expected):
    assert bool(path_pattern(key).search(path)) is expected


def test_rules_of_a_region():
    x = jnp.ones((2, 2))
    with jamp.autocast(jnp.float16, rules={"block_1": jnp.float32}):
        dtypes = []
        for i in (1, 10, 2, 21):
            with jax.named_scope(f"block_{i}"):
                dtypes.append(str((x @ x).dtype))
    assert dtypes == ["float32", "float16", "float16", "float16"]
