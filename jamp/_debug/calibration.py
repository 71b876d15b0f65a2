"""What `calibrate` returns: measured products and rules, as text, JSON and a plot."""

import dataclasses
import json
import math
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import jax.numpy as jnp

from .._autocast.float8 import RECIPES, Float8
from .._checks import shown
from .plots import RED, axes, finish
from .product_errors import DIRECTIONS
from .report import SHOWN, Report, Table, percent, shortened

if TYPE_CHECKING:
    from matplotlib.axes import Axes

VERSION = 1  # of the JSON
FLOAT8_NAME = Float8.name
TENSORWISE = RECIPES[0]  # which rules and reports call "float8"
NO_PATH = """{} no module path, so no rule can name {}: {}. Linen, Haiku and the \
layers of eqx.nn write paths. For NNX, calibrate and train \
`jamp.nnx.named_scopes(model)`. Elsewhere, put the product into `with \
jax.named_scope("name"):`."""
NOT_JSON = """Calibration.from_json takes what `to_json()` returned, as text; got {}."""


class ProductRow(NamedTuple):
    """One product of a `Calibration`, with all runs of a loop and all equal ones."""

    path: str  # the modules around it, or ""
    line: str
    primitive: str
    sizes: str  # "rows x contracted x columns", of a batch "8 of ..."; or the shapes
    # By dtype or recipe and direction: the errors of the whole and of the worst row.
    errors: dict[str, dict[str, tuple[float, float]]]
    problem: str  # why it cannot run in float8, or ""
    choice: str  # "float8", "rowwise", "bfloat16", "float16" or "float32"
    why: str  # why it is not what was asked for

    def worst(self, name: str) -> float | None:
        """The largest error in a dtype or recipe, None if it was not measured."""
        pairs = self.errors.get(name, {}).values()
        return max(map(max, pairs), default=None)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Calibration(Report):
    """Which products of a model tolerate which dtype. From `jamp.calibrate`.

    Attributes:
      function: its name.
      dtype: the dtype or float8 recipe that was asked for.
      tolerance: the largest relative error that a product may have.
      skip_small: whether products that are too small to pay stay out of float8.
      loss_scale: the scale with which gradients were cast to float16; otherwise 1.
      rows: the products, in the order in which they were traced.
      patterns: regular expressions of module paths, and what runs there, as text.

    Raises:
      TypeError: it was read as a bool; ask for `found`.
      ValueError: `from_json` got other text.

    Examples:
      >>> import jax, jax.numpy as jnp, jamp
      >>> def loss_fn(w, x):
      ...     with jax.named_scope("head"):
      ...         return jnp.sum(x @ w)
      >>> w, x = jnp.ones((64, 32)), jnp.ones((16, 64))
      >>> report = jamp.calibrate(loss_fn, skip_small=False)(w, x)
      >>> report.rules
      {'(^|/)head$': 'float8'}
      >>> jamp.debug.Calibration.from_json(report.to_json()).rules == report.rules
      True
    """

    function: str
    dtype: str
    tolerance: float
    skip_small: bool
    loss_scale: float
    rows: list[ProductRow]
    patterns: dict[str, str]

    @property
    def rules(self) -> dict[str, Any]:
        """For `jamp.autocast(jnp.bfloat16, rules=report.rules)`, by module path.

        A float16 calibration's are for `jamp.autocast(jnp.float16, ...)`. A product has
        no rule if it needs none: it cannot run in float8, or it is beside ops that
        belong in float32, which a rule would also bring into bfloat16.
        """
        return {key: as_rule(name) for key, name in self.patterns.items()}

    @property
    def found(self) -> list[str]:
        """The products that do not run in the dtype that was asked for, as text."""
        rows = [row for row in self.rows if row.choice != called(self.dtype)]
        return [
            f"{row.choice} {row.path or row.line} {row.sizes}: {row.why}"
            for row in rows
        ]

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain dicts and lists: the attributes, and `found`."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        rows = [row._asdict() for row in self.rows]
        return {**fields, "rows": rows, "found": self.found}

    def to_json(self) -> str:
        """The report as text, for a file: `Path(...).write_text(report.to_json())`."""
        fields = self.to_dict()
        del fields["found"]
        return json.dumps(as_json({"version": VERSION, **fields}), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The report that `to_json` wrote.

        Raises:
          TypeError: `text` is not text.
          ValueError: it is other text.
        """
        if not isinstance(text, str | bytes):
            raise TypeError(NOT_JSON.format(shown(text)))
        names = {field.name for field in dataclasses.fields(cls)}
        try:
            fields = json.loads(text)
            version = fields.pop("version")
            if version != VERSION or set(fields) != names:
                raise ValueError(version)
            rows = [row_from_json(row) for row in fields.pop("rows")]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(NOT_JSON.format(shown(text))) from error
        return cls(rows=rows, **fields)

    def plot(self, ax: "Axes | None" = None) -> "Axes":
        """Draws each product's largest error in each dtype, and the tolerance.

        Args:
          ax: matplotlib Axes to draw into, or None for a new figure.

        Returns:
          The Axes; `ax.figure.savefig(path)` writes a file.

        Raises:
          ImportError: matplotlib is not installed.
          TypeError: `ax` is not Axes.
        """
        rows = self.rows
        ax = axes("Calibration.plot", ax, (9, 1.6 + 0.32 * max(len(rows), 1)))
        for name in dict.fromkeys(name for row in rows for name in row.errors):
            worst = {place: row.worst(name) for place, row in enumerate(rows)}
            drawn = {place: min(error, 1.0) for place, error in worst.items() if error}
            ax.plot([*drawn.values()], [*drawn], "o", label=called(name))
        label = f"tolerance, {percent(self.tolerance)}"
        ax.axvline(self.tolerance, color=RED, ls="--", lw=1, label=label)
        ax.set_xscale("log")
        ax.set(xlabel="largest relative error of a row (1 and more: at the right edge)")
        labels = [
            f"{shortened(row.path or row.line or '-', 32)}  {row.sizes}: {row.choice}"
            for row in rows
        ]
        ax.set_yticks(range(len(rows)), labels, fontsize=8)
        ax.invert_yaxis()
        return finish(ax, 4)

    def _parts(self, table: Table) -> list[str]:
        asked, rows = called(self.dtype), self.rows
        if not rows:
            return [
                f"{self.function}: no matrix products that autocast lowers. Products "
                "under a policy, or under autocast(enabled=False), are not seen."
            ]
        share = sum(row.choice == asked for row in rows)
        nameless = [row for row in rows if not row.path]
        # Float8 needs a rule, and a float16 region does not.
        is_out_of_reach = self.dtype in RECIPES and any(
            row.choice == asked for row in nameless
        )
        head = (
            f"{self.function}: {share} of {len(rows)} products "
            f"{'could run ' if is_out_of_reach else ''}in {asked}, with errors up to "
            f"{percent(self.tolerance)}"
        )
        head += (
            f" at a loss scale of {self.loss_scale:g}" if self.loss_scale > 1 else ""
        )
        more = len(rows) - SHOWN
        parts = [head]
        if nameless:
            one = len(nameless) == 1
            text = "a product has" if one else f"{len(nameless)} products have"
            places = ", ".join(dict.fromkeys(row.line or "?" for row in nameless))
            parts.append(NO_PATH.format(text, "it" if one else "them", places))
        parts.append(rows_table(rows[:SHOWN], table))
        parts.append(f"... and {more} more, see to_dict()" if more > 0 else "")
        return parts


def called(recipe: str) -> str:
    return FLOAT8_NAME if recipe == TENSORWISE else recipe


def as_rule(name: str) -> Any:
    if name == FLOAT8_NAME:
        return FLOAT8_NAME
    return Float8(name) if name in RECIPES else jnp.dtype(name)


def rows_table(rows: list[ProductRow], table: Table) -> str:
    """Sizes and the largest error by dtype; 4.1/5.9/5.8 are the directions."""
    names = list(dict.fromkeys(name for row in rows for name in row.errors))
    header = ["module", "product", *(f"{called(n)} %" for n in names)]
    cells = []
    for row in rows:
        errors = (errors_text(row.errors.get(name, {})) for name in names)
        place, why = shortened(row.path, 32) or "-", row.why or row.problem
        cells.append((place, row.sizes, *errors, row.choice, why))
    return table([*header, "choice", "why"], cells)


def errors_text(errors: dict[str, tuple[float, float]]) -> str:
    """The worst row's error forward, in dgrad and in wgrad, in percent."""
    tops = [max(errors[at]) if at in errors else None for at in DIRECTIONS]
    if not errors:
        return "-"
    return "/".join("-" if top is None else f"{100 * top:.2g}" for top in tops)


def as_json(value: object) -> object:
    """The value, with numbers that JSON lacks as text."""
    if isinstance(value, dict):
        return {key: as_json(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(inner) for inner in value]
    is_odd = isinstance(value, float) and not math.isfinite(value)
    return str(value) if is_odd else value


def row_from_json(fields: dict[str, Any]) -> ProductRow:
    row = ProductRow(**fields)
    errors = {
        name: {at: (float(whole), float(worst)) for at, (whole, worst) in pairs.items()}
        for name, pairs in row.errors.items()
    }
    return row._replace(errors=errors)
