"""The migration guide: jamp's side of each pair runs, in order, without torch."""

import re

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jamp
from shared.guide import BLOCKS, BOTH, JAMP, OPTAX, TEXT, TORCH, blocks, rows


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


def test_every_block_has_a_title_that_is_run():
    assert {block.title for block in BLOCKS} == {BOTH, TORCH, JAMP, OPTAX}
    assert len(BLOCKS) == TEXT.count("```python") == TEXT.count("```") / 2


def test_pairs_have_two_sides():
    pairs = re.findall(r'<div class="pair" markdown>\n(.*?)\n</div>', TEXT, re.DOTALL)
    assert len(pairs) == TEXT.count("<div") > 20
    for pair in pairs:
        titles = [block.title for block in blocks(pair)]
        assert titles == [TORCH, JAMP] * (len(titles) // 2)


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.recipe)
def test_blocks_fit_side_by_side(block):
    assert max(map(len, block.code.splitlines())) <= 60
    assert len(block.code.splitlines()) <= 20


def test_the_names_in_the_table_exist():
    cells = rows(TEXT, "| torch | jamp with NNX |")
    right = " ".join(cell for row in cells for cell in row[1:])
    names = re.findall(r"jamp\.(\w+)", right)
    assert {"autocast", "GradScaler", "dynamic_loss_scale"} <= set(names)
    assert all(hasattr(jamp, name) for name in names)
    methods = re.findall(r"scaler\.(\w+)", right)
    assert methods and all(hasattr(jamp.GradScaler, name) for name in methods)
    assert all(len(row) == 3 for row in cells)
