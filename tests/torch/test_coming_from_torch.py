"""The migration guide: jamp's side of each pair runs, in order, without torch."""

import re

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jamp
from shared.guide import BLOCKS, TEXT, TORCH, rows


@pytest.mark.slow
def test_all_of_jamps_side_runs(standard_promotion, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace, models = {}, {}
    for block in BLOCKS:
        if block.title != TORCH:
            exec(compile(block.code, block.recipe, "exec"), namespace)
            models[block.recipe] = namespace.get("model")

    # what the text claims
    assert sum(namespace["skips"]) == 1
    assert namespace["optimizer0"].step[...] == 7  # skipped at the outlier
    assert namespace["optimizer1"].step[...] == 8
    assert namespace["optimizer"].step[...] == 7
    assert namespace["half"].dtype == namespace["again"].dtype == jnp.float16
    assert namespace["full"].dtype == jnp.float32
    assert jnp.max(jnp.abs(namespace["output"])) > 2.0
    assert namespace["state"]["growth_interval"] == 3
    ends = models["Typical training"], models["Save and resume"]
    through, resumed = map(jax.tree.leaves, map(nnx.state, ends))
    assert all(map(jnp.array_equal, through, resumed))


def test_the_names_in_the_table_exist():
    cells = rows(TEXT, "| torch | jamp with NNX |")
    right = " ".join(cell for row in cells for cell in row[1:])
    names = re.findall(r"jamp\.(\w+)", right)
    assert {"autocast", "GradScaler", "dynamic_loss_scale"} <= set(names)
    assert all(hasattr(jamp, name) for name in names)
    methods = re.findall(r"scaler\.(\w+)", right)
    assert methods and all(hasattr(jamp.GradScaler, name) for name in methods)
    assert all(len(row) == 3 for row in cells)
