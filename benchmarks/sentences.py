"""Figures in the sentences of pages, from the committed JSON.

    python -m benchmarks.sentences

prints the sentences that the pages do not have, with the figures as they are. Tables
are made by `benchmarks.tables` and `benchmarks.targets_page`.
"""

import functools
import json
import statistics
from pathlib import Path

from benchmarks import loss_scale_overhead
from benchmarks._harness import Ratio
from benchmarks.tables import AGAIN, over_seeds

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


def loss_scaled(donated):
    """How long an update of 100 million parameters takes with loss scaling, to without.

    Returns:
      with `jamp.step`, and with the other rows. They are the medians of the ratios of
      rounds. Keras's is to Keras's own plain AdamW.
    """
    title = f"100.0 million parameters, {'' if donated else 'not '}donated"
    rows = results("nvidia-h200/loss-scale")[title]
    ratios = {n: row["ratio"] for n, row in rows.items() if not n.startswith("plain")}
    return ratios.pop("jamp.step"), list(ratios.values())


def update(form):
    """Milliseconds of an update alone on an H200, by the form of the parameters."""
    return results("nvidia-h200/masters")[form]["milliseconds"]


def compared(rows, again):
    """Row -> its ratio to the step without jamp, or that it is level with it."""
    floor = abs(rows[again]["ratio"] - 1)
    return {
        name: "level"
        if Ratio(row["ratio"], row["error"]).is_level(floor)
        else f"{row['ratio']:.2f}"
        for name, row in rows.items()
    }


def scaled_on_a_cpu(size):
    """The same of loss scaling alone, donated, by millions of parameters."""
    found = results("cpu/loss-scale")
    (title,) = (t for t in found if t.startswith(size) and t.endswith(", donated"))
    return compared(found[title], loss_scale_overhead.AGAIN)


def full(name):
    """Row -> what its step of GPT-2 becomes when it is compiled for an H100."""
    return results(name)["h100 gpt2"]["rows"]


def compiled(row):
    """Peak and bytes moved, in GB, of a step of GPT-2 that is compiled for an H100."""
    figures = full("full-h100-gpt2-triton")[row]
    return figures["peak_bytes"] / 1e9, figures["bytes"] / 1e9


def span(ratios, digits=2):
    """The least and the largest of some ratios."""
    least, largest = (f"{end(ratios):.{digits}f}" for end in (min, max))
    return least if least == largest else f"{least} to {largest}"


def on_an_h200():
    ms = steps()
    ways = AUTOCAST, SCALER, "jamp Policy + dynamic_loss_scale"
    costs = [ms[row] - ms[BY_HAND] for row in ways]
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
    yield (
        "docs/float16-or-bfloat16.md",
        f"[{min(costs):.0f} to {max(costs):.0f} ms more]",
    )
    for page in "docs/performance.md", "benchmarks/README.md":
        yield page, f"lie {ms[SCALER] - ms[AUTOCAST]:.1f} ms apart"
    (donated, others), (kept, kept_others) = map(loss_scaled, (True, False))
    yield (
        "docs/performance.md",
        f"takes {donated:.2f} times as long as without it with `jamp.step`, and "
        f"{span(others)} with jamp's other ways, Keras, Flax, mpx and jmp, which these "
        f"rounds do not tell apart. Not donated, it takes {kept:.2f}, and the others "
        f"{span(kept_others)}.",
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
    forms = results("nvidia-h200/masters")
    for said, form in {
        "float32 parameters, autocast": "float32",
        "`master_weights`": "master_weights",
        "`master_weights`, `remainder=True`": "remainder",
    }.items():
        held = forms[form]["held"]
        moved = [forms[f]["bytes_per_parameter"] for f in (form, f"scaled {form}")]
        yield (
            "docs/policy.md",
            f"| {said} | {held:.0f} | {7 * held:.0f} GB | "
            f"{moved[0]:.0f} | {moved[1]:.0f} |",
        )
    kernels = forms["float32"]["kernels"], forms["scaled float32"]["kernels"]
    yield "docs/policy.md", "There are {} kernels, and {} under a loss".format(*kernels)
    tried = results("nvidia-h200/float8-compile")["rows"]
    half = tried["bfloat16"]["seconds"]
    yield (
        "docs/float8.md",
        f"had {tried['float8']['outcome']} in float8, beside other programs, where "
        f"bfloat16 took {half:.0f} s",
    )


def for_an_h100():
    """What is compiled, and not run."""
    rows = {
        "autocast": AUTOCAST,
        "float16 by hand": BY_HAND,
        "the same, with autocast's float32 residual stream": (
            "float16 by hand, float32 residual"
        ),
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
    yield "docs/performance.md", f"the step moves {moved / plain:.2f} of the bytes"
    own = full("full-h100-gpt2")
    assert (
        own["float16 + loss scale, jamp.dot_product_attention"]["bytes"]
        == (own[AUTOCAST]["bytes"])
    )
    gradients = results("full-h100-gpt2")["h100 gpt2"]["gradient_bytes"]
    reads = (own[AUTOCAST]["bytes"] - own["float16"]["bytes"]) / gradients
    assert own[AUTOCAST]["conditionals"] == own[AUTOCAST]["host"] == 0
    yield "docs/performance.md", f"adds {reads:.2f} reads of the gradients in GPT-2"
    kernels = own[AUTOCAST]["kernels"] - own["float16"]["kernels"]
    yield "docs/performance.md", f"adds {kernels} kernels to GPT-2's step"
    flax = full("full-h100-gpt2-triton")["flax DynamicScale, by hand"]["kernels"]
    flax -= full("full-h100-gpt2-triton")[BY_HAND]["kernels"]
    yield "docs/performance.md", f"which reduces each array, {flax}"
    rows = results("full-h100-llama")["h100 llama"]["rows"]
    seconds = [rows[row]["seconds"] for row in ("float8", "rowwise")]
    yield (
        "docs/float8.md",
        f"one of width 8192 compiles in {min(seconds):.0f} to {max(seconds):.0f} s",
    )


def on_a_cpu():
    donated, large = map(scaled_on_a_cpu, ("4.2", "100.0"))
    yield (
        "docs/performance.md",
        "`jamp.step`, donated, optimizer-bound: 4.2 and 100 million parameters | "
        f"{donated['jamp.step']}, {large['jamp.step']} |",
    )
    yield (
        "docs/performance.md",
        f"takes {donated['jamp.step']} times as long with a loss scale and "
        "`jamp.step`, which applies the updates inside of the conditional, "
        f"{donated['jamp.GradScaler']} with `GradScaler`, and "
        f"{donated['jamp, tx.update']} with `tx.update`",
    )
    yield (
        "docs/retry.md",
        f"takes {donated['jamp.retry']} times as long as without a loss scale, and "
        f"{donated['jamp.step']} without `retry`",
    )
    parts = {"gpt2": "train", "resnet50": "train-resnet50", "vit": "train"}
    whole = [compared(results(f"cpu/{parts[m]}")[m], AGAIN) for m in parts]
    policy, region = (
        ", ".join(rows[row] for rows in whole)
        for row in ("jamp Policy + dynamic_loss_scale", AUTOCAST)
    )
    yield "docs/performance.md", f"by a policy: GPT-2, ResNet, ViT | {policy} |"
    yield "docs/performance.md", f"| whole steps under autocast | {region} |"
    built = results("cpu/compile-time")["ratio"]["total"]["value"]
    yield "docs/performance.md", f"| [trace](#tracing) and compile | {built:.2f} |"
    ops = results("cpu/eager")["eager"]
    ops = [
        row["inside"] / row["outside"]
        for name, row in ops.items()
        if name not in ("nn.Dense", "the region")
    ]
    yield (
        "docs/performance.md",
        f"| an [eager op](#eager-ops) in a region, against outside | {span(ops, 0)} |",
    )
    logged = results("cpu/logging")["rows"]
    report, search = (
        Ratio(row["ratio"], row["error"])
        for name in ("overflow_report", "find_nonfinite")
        for row in [logged[f"{name}(when=skipped)"]]
    )
    assert report.is_level()
    yield (
        "docs/debugging.md",
        "takes as long with `overflow_report` as without it, and "
        f"{search.value:.2f} times as long with `find_nonfinite`",
    )
    errors = results("cpu/scaled-error")
    sizes = errors["log2 of gradients"]
    wrong = sum(error > 0.05 for error in errors["float16, best loss scale"])
    yield (
        "docs/scaled-float16.md",
        f"are between 2^{min(sizes):.0f} and 2^{max(sizes):.0f}. In plain float16 the "
        f"best power of two as a loss scale leaves {wrong} layers wrong",
    )


def of_the_examples():
    names = "gpt-experts", "rl", "fsdp"
    experts, rl, fsdp = (results(f"examples/{name}") for name in names)
    half, eighth = (
        over_seeds(experts[name]["test loss"], 3) for name in ("bfloat16", "float8")
    )
    yield "docs/examples.md", f"gave {half} in bfloat16 and {eighth} in float8"
    apart = [statistics.mean(rl[name]["mismatch"]) for name in ("bfloat16", "float16")]
    yield (
        "docs/examples.md",
        f"In bfloat16 the two disagree {apart[0] / apart[1]:.1f} times as much",
    )
    whole, part = (fsdp["float32"][f"MB {of}"][0] for of in ("of state", "a device"))
    yield (
        "docs/examples.md",
        f"each device holds {part:.2f} MB of the {whole:.2f} MB of parameters",
    )


def sentences():
    """(page, sentence) for each sentence that has measured figures."""
    yield from on_an_h200()
    yield from for_an_h100()
    yield from on_a_cpu()
    yield from of_the_examples()


def missing():
    for page, sentence in sentences():
        if sentence not in " ".join((ROOT / page).read_text().split()):
            yield page, sentence


if __name__ == "__main__":
    found = list(missing())
    for row in found:
        print(*row, sep=": ")
    raise SystemExit(bool(found))
