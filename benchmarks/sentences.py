"""Figures in the sentences of pages, from the committed JSON.

    python -m benchmarks.sentences

prints the sentences that the pages do not have, with the figures as they are. Tables
are made by `benchmarks.gpu_page` and `benchmarks.targets_page`.
"""

import functools
import json
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
AUTOCAST, SCALER = "jamp.autocast + dynamic_loss_scale", "jamp.autocast + GradScaler"
EMBED = "the same, rules={nnx.Embed: float16}"
COMPILED, BY_HAND = "torch.compile AMP", "float16 by hand"


@functools.cache
def results(name):
    return json.loads((RESULTS / f"{name}.json").read_text())["results"]


@functools.cache
def steps():
    """Milliseconds of a step of GPT-2 on an H200, by row."""
    rows = results("nvidia-h200/train-gpt2")["gpt2"]
    rows = rows | results("nvidia-h200/torch-gpt2")["gpt2"]
    return {name: row["milliseconds"] for name, row in rows.items()}


def scaled(row, donated=True):
    """How long an update of 100 million parameters takes with loss scaling, to without.

    It is the median of the ratios of rounds. Keras's is to Keras's own plain AdamW.
    """
    title = f"100.0 million parameters, {'' if donated else 'not '}donated"
    return results("nvidia-h200/loss-scale")[title][row]["ratio"]


def update(form):
    """Milliseconds of an update alone on an H200, by the form of the parameters."""
    return results("nvidia-h200/masters")[form]["milliseconds"]


def compiled(row):
    """Peak and bytes moved, in GB, of a step of GPT-2 that is compiled for an H100."""
    figures = results("full-h100-gpt2-triton")["h100 gpt2"]["rows"][row]
    return figures["peak_bytes"] / 1e9, figures["bytes"] / 1e9


def sentences():
    """(page, sentence) for each sentence that has measured figures."""
    ms = steps()
    costs = [ms[row] - ms[BY_HAND] for row in (AUTOCAST, SCALER)]
    yield (
        "README.md",
        f"a step of GPT-2 takes {ms[AUTOCAST]:.1f} ms with jamp, as with Flax's "
        f"DynamicScale on a model cast by hand, and {ms['float32']:.1f} in float32",
    )
    yield "README.md", f"with AMP is faster: {ms[COMPILED]:.1f} ms"
    assert abs(ms[AUTOCAST] - ms["flax DynamicScale, by hand"]) < 1  # not resolved
    faster = ms["float32"] / ms[AUTOCAST]
    yield "docs/index.md", f"GPT-2 trains [{faster:.1f} times as fast as in"
    yield "docs/index.md", f"takes {ms[COMPILED] / ms[AUTOCAST]:.2f} times as long"
    yield "docs/float16-or-bfloat16.md", f"{ms[BY_HAND]:.0f} ms cast by hand"
    yield "docs/float16-or-bfloat16.md", f"[1 to {max(costs):.0f} ms more]"
    yield "docs/performance.md", f"lie {ms[SCALER] - ms[AUTOCAST]:.1f} ms apart"
    yield (
        "docs/performance.md",
        f"takes {scaled('jamp.step'):.2f} times as long as without it with `jamp.step` "
        f"and `GradScaler`, and {scaled('jamp, tx.update'):.2f} with `tx.update`. "
        f"Keras takes {scaled('Keras LossScaleOptimizer'):.2f}, "
        f"Flax {scaled('flax DynamicScale'):.2f}, mpx {scaled('mpx'):.2f} "
        f"and jmp {scaled('jmp'):.2f}. "
        f"Not donated, `jamp.step` takes {scaled('jamp.step', False):.2f}, "
        f"`GradScaler` {scaled('jamp.GradScaler', False):.2f} and `tx.update` "
        f"{scaled('jamp, tx.update', False):.2f}, and Flax "
        f"{scaled('flax DynamicScale', False):.2f}.",
    )
    rows = {
        "and gelu saved once: autocast": AUTOCAST,
        "float16 by hand": BY_HAND,
        "float16 by hand, with a masked loss and a checkpoint around each gelu": (
            "float16 by hand, saving as torch"
        ),
    }
    for said, row in rows.items():
        peak, moved = compiled(row)
        yield "docs/performance.md", f"| {said} | {peak:.2f} GB | {moved:.1f} GB |"
    (peak, moved), (kept, plain) = map(compiled, (EMBED, AUTOCAST))
    _, policy = compiled("jamp Policy + dynamic_loss_scale")
    yield (
        "docs/performance.md",
        f"moves {moved:.1f} GB in place of {plain:.1f}, and its peak is {peak:.2f} GB "
        f"in place of {kept:.2f}; a [policy](policy.md), whose loss is outside of a "
        f"region, moves {policy:.1f} GB.",
    )
    yield (
        "docs/policy.md",
        f"takes {update('float32'):.2f} ms in float32, {update('master_weights'):.2f} "
        f"with `master_weights`, {update('remainder'):.2f} with remainders, and under "
        f"a loss scale {update('scaled float32'):.2f}, "
        f"{update('scaled master_weights'):.2f} and {update('scaled remainder'):.2f}",
    )
    yield (
        "docs/policy.md",
        f"parameters without masters take {update('bfloat16 alone'):.2f} ms",
    )


def missing():
    for page, sentence in sentences():
        if sentence not in " ".join((ROOT / page).read_text().split()):
            yield page, sentence


if __name__ == "__main__":
    for row in missing():
        print(*row, sep=": ")
