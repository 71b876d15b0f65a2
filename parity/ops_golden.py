"""A file of torch's dtypes for every op, to check jamp without torch."""

import json
import pathlib
from collections.abc import Iterable
from importlib.metadata import version
from typing import Any

from .result import Result

PATH = pathlib.Path(__file__).with_name("golden_ops.json")


def pack(results: Iterable[Result]) -> dict[str, Any]:
    """The dtypes of torch's results and gradients, by case and inputs."""
    made = {}
    for result in sorted(results, key=lambda result: result.case):
        torch, grads = result.data.torch, result.data.grads
        made[result.case] = {name: [torch[name], grads[name]] for name in torch}
    return made


def write_golden(results: Iterable[Result]) -> None:
    """Replaces the committed file."""
    lines = [f"{json.dumps(k)}: {json.dumps(v)}" for k, v in pack(results).items()]
    head = f'"torch": {json.dumps(version("torch"))}'
    text = "{\n" + head + ',\n"ops": {\n' + ",\n".join(lines) + "\n}\n}\n"
    PATH.write_text(text, encoding="utf-8")


def load() -> dict[str, Any]:
    """The committed dtypes, as `pack` gives them."""
    return json.loads(PATH.read_text(encoding="utf-8"))["ops"]


def differences(results: Iterable[Result]) -> list[str]:
    """The cases that the committed file lacks, has in excess, or has different."""
    made, committed = pack(results), load()
    names = sorted(made.keys() | committed.keys())
    return [name for name in names if made.get(name) != committed.get(name)]
