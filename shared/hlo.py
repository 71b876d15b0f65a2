"""What a compiled program does: its kernels, and the bytes that they read and write.

Both are counted in the text of the optimized HLO. A kernel is an instruction of the
entry computation that does work. For a conditional, the instructions of its true branch
count, which a finite step runs. A kernel's bytes are those of its whole operands and
results, without what a TPU holds in its vector memory. A transfer between that and the
main memory counts once. Scalar instructions of a TPU's are not kernels.
"""

import re
from collections import Counter
from typing import NamedTuple

WIDTHS = {"pred": 1, "bf16": 2}
FREE = {"bitcast", "constant", "get-tuple-element", "parameter", "tuple"}
# Ops that make the host wait, or bring data to it.
HOST = {"infeed", "outfeed", "recv", "recv-done", "send", "send-done"}
INSTRUCTION = re.compile(r"(?:ROOT )?%?([\w.-]+) = (\(.*?\)|\S+) ([\w-]+)\((.*)$")
TRANSFERS = {"copy-start", "slice-start", "async-start"}
# With its layout, which says where it lies: S(1) is a TPU's vector memory.
ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\](\{[^}]*\})?")
ON_TPU = "T(8,128)"  # in a layout, a TPU's tiles
BRANCHES = re.compile(r"(?:branch_computations=\{|true_computation=)([^}]*)")


class Instruction(NamedTuple):
    """One line of a computation."""

    name: str
    op: str
    shape: str
    operands: tuple[str, ...]
    text: str


class Program(NamedTuple):
    """The figures of a compiled step."""

    kernels: int
    copies: int
    conditionals: int  # in any computation
    host: int  # instructions that talk to the host
    bytes: int
    temporary_bytes: int
    peak_bytes: int


def summarize(compiled) -> Program:
    """The figures of what `jax.jit(...).lower(...).compile()` returns."""
    computations = parse(compiled.as_text())
    kernels = list(executed(computations, "ENTRY"))
    ops = Counter(instruction.op for instruction, _ in kernels)
    copies = [i for i, _ in kernels if i.op.startswith("copy") or "copy" in i.name]
    memory = compiled.memory_analysis()
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes
    temporary = memory.temp_size_in_bytes
    return Program(
        kernels=len(kernels),
        copies=len(copies),
        conditionals=sum(
            i.op == "conditional"
            for name, instructions in computations.items()
            if name != "ENTRY"  # also listed under its own name
            for i in instructions
        ),
        host=sum(ops[op] for op in HOST) + compiled.as_text().count("_callback"),
        bytes=sum(size for _, size in kernels),
        temporary_bytes=temporary,
        peak_bytes=held - memory.alias_size_in_bytes + temporary,
    )


def executed(computations, name):
    """Each kernel of a computation, with its bytes."""
    shapes = {i.name: i.shape for i in computations[name]}
    on_tpu = any(ON_TPU in shape for shape in shapes.values())
    for instruction in computations[name]:
        if on_tpu and (is_scalar(instruction) or instruction.op.endswith("-done")):
            continue
        if on_tpu and instruction.op in TRANSFERS:
            # The operands, or result and operand; then the result, and a handle.
            *_, result, _ = re.findall(r"\w+\[[\d,]*\]", instruction.shape)
            yield instruction, size_of(result)
        elif instruction.op == "conditional":
            run = BRANCHES.search(instruction.text).group(1).split(",")
            # jax.lax.cond chooses by index, with the true branch last.
            is_indexed = "branch_computations" in instruction.text
            yield from executed(computations, run[-1 if is_indexed else 0].strip(" %"))
        elif instruction.op not in FREE:
            read = sum(size_of(shapes.get(n, "")) for n in instruction.operands)
            yield instruction, read + size_of(instruction.shape)


def parse(text: str) -> dict[str, list[Instruction]]:
    """Computation -> its instructions; the entry is also under "ENTRY"."""
    computations, current = {}, None
    for line in text.splitlines():
        start = re.match(r"(ENTRY )?%?([\w.-]+) .*\{$", line)
        if start:
            current = computations.setdefault(start.group(2), [])
            if start.group(1):
                computations["ENTRY"] = current
        elif current is not None and (match := INSTRUCTION.match(line.strip())):
            name, shape, op, rest = match.groups()
            operands = tuple(re.findall(r"%([\w.-]+)", rest.split("), ")[0]))
            current.append(Instruction(name, op, shape, operands, line))
    return computations


def is_scalar(instruction: Instruction) -> bool:
    return all(not dimensions for _, dimensions, _ in ARRAY.findall(instruction.shape))


def size_of(shape: str) -> int:
    """Bytes of a shape, or of the shapes in a tuple, that lie in the main memory."""
    total = 0
    for dtype, dimensions, layout in ARRAY.findall(shape):
        count = 0 if "S(1)" in layout else 1
        for dimension in filter(None, dimensions.split(",")):
            count *= int(dimension)
        bits = re.match(r"[a-z]+(\d+)", dtype)
        total += count * (WIDTHS.get(dtype) or (int(bits.group(1)) // 8 if bits else 0))
    return total
