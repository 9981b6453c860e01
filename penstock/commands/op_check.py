"""Checks that a step computes what the references compute: every op, on its inputs in that step.

Runs before a shape is timed, with the same rows, contexts and kernels. One layer of each kind runs
once, and each op twice: the device's kernel and its reference. Both get the same inputs, so errors
do not add up and no router flips: a row may differ by the rounding of one op, and the limits follow
from the dtype. Graphs are then compared with the same step launched kernel by kernel.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from penstock.errors import PenstockError

if TYPE_CHECKING:
    from torch import Tensor

    from penstock.engine.runner import Runner
    from penstock.ops import RoundedTokens
    from penstock.types import StepPlan

Run = Callable[..., Any]
Given = dict[str, Any]

# Largest error relative to what an op adds to a row: half a dozen roundings of the dtype. A row
# that is a tenth too large, or that used one wrong expert of eight, is several times further off.
TOLERANCES = {"float32": 1e-4, "float16": 5e-3, "bfloat16": 2e-2}
# Difference between two results that are both rounded to the dtype.
ROUNDINGS = {"float32": 2**-22, "float16": 2**-10, "bfloat16": 2**-7}
# For the delta rule over whole blocks, which keeps products in the model's dtype.
WHOLE_CHUNK_FACTOR = 3.0
# For activations rounded to 8 bits before a product: where two results in the model's dtype differ,
# a few per cent of the codes are one step apart, and a step is an eighth of the value.
ROUNDED_TOKENS_FACTOR = 2.0
# For results that are written in 8 bits: half a step of a code is up to a sixteenth of its value.
CODES_FACTOR = 3.0
FEW_TOKENS = 512  # with more tokens, the reference would take minutes in fixed tiles
ROWS_AT_ONCE = 2048
# Share of rows without a limit: a graph's step runs all layers, where routers may flip.
FAR_ROWS = 0.1
NO_GRAPHS: Mapping[str, Any] = dict.fromkeys(("graphs", "prefill_graphs", "draft_graphs"))


@dataclass(frozen=True, slots=True)
class OpError:
    """The row of an op with the largest error."""

    op: str
    error: float  # relative to what the op adds to the row
    of_limit: float  # above 1 is wrong
    num_wrong: int  # rows
    num_rows: int

    def as_dict(self) -> dict[str, Any]:
        return {"op": self.op, "op_error": round(self.error, 6)}


@dataclass(slots=True)
class OpCheck:
    """Called in place of each op; runs the chosen kernel and the reference."""

    dtype: str
    found: list[OpError] = field(default_factory=list)  # in the order of the step

    def __call__(
        self, reference: Run, run: Run, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        bound = inspect.signature(reference).bind(*args, **kwargs)
        bound.apply_defaults()
        compare = _COMPARISONS.get(reference.__name__)
        if compare is None:
            return run(*args, **kwargs)
        return compare(self, reference, run, dict(bound.arguments))

    def record(
        self,
        op: str,
        seen: Tensor | RoundedTokens,
        expected: Tensor,
        base: Tensor | None = None,
        factor: float = 1.0,  # times the tolerance
    ) -> None:
        """Compares row by row; with a base such as a residual, relative to what was added to it."""
        import torch

        from penstock.ops import RoundedTokens

        if isinstance(seen, RoundedTokens):
            seen, factor = seen.dequantize(), max(factor, CODES_FACTOR)
        parts = []
        for first in range(0, len(expected), ROWS_AT_ONCE):
            some = slice(first, first + ROWS_AT_ONCE)
            there = expected[some].flatten(1).float()
            added = there if base is None else there - base[some].flatten(1).float()
            error = (seen[some].flatten(1).float() - there).norm(dim=1)
            parts.append(torch.stack((error, added.norm(dim=1), there.norm(dim=1))))
        error, added, there = torch.cat(parts, dim=1)
        if op.startswith("gated_delta_net") and len(error) > FEW_TOKENS:
            factor = WHOLE_CHUNK_FACTOR
        tolerance, rounding = factor * TOLERANCES[self.dtype], ROUNDINGS[self.dtype]
        limit = tolerance * added.maximum(0.1 * added.mean()) + rounding * there + 1e-30
        of_limit = (error / limit).nan_to_num(nan=torch.inf)
        at = int(of_limit.argmax())
        found = OpError(
            op,
            float(error[at] / added[at].clamp(min=1e-30)),
            float(of_limit[at]),
            int((of_limit > 1).sum()),
            len(error),
        )
        self.found.append(found)

    def worst(self) -> OpError:
        """The first wrong op, since later ones may inherit its NaN; else the largest error."""
        wrong = (found for found in self.found if not found.of_limit <= 1)
        return next(wrong, None) or max(self.found, key=lambda found: found.of_limit)


def _expected(reference: Run, given: Given) -> Any:
    """With few tokens, the reference sums in fixed tiles and row by row, as no kernel does. Not
    where it may round tokens to 8 bits, which `deterministic` never does.
    """
    first: Tensor = next(iter(given.values()))
    if "spans" in given:  # only the device knows the context length of a decode
        pairs = zip(given["spans"], given["context_lens"].tolist())
        given = given | {"spans": [dataclasses.replace(span, context_len=n) for span, n in pairs]}
    if "deterministic" in given and len(first) <= FEW_TOKENS and not _rounds_tokens(given):
        given = {**given, "deterministic": True}
    return reference(**given)


def _compare_results(check: OpCheck, reference: Run, run: Run, given: Given) -> Any:
    residual = given.get("residual")
    if residual is not None:
        residual = residual.clone()  # the op may write its result there
    expected = _expected(
        reference, {**given, "ids": given["ids"].long()} if "ids" in given else given
    )
    seen = run(**given)
    factor = ROUNDED_TOKENS_FACTOR if _rounds_tokens(given) else 1.0
    check.record(reference.__name__, seen, expected, residual, factor)
    return seen


def _rounds_tokens(given: Given) -> bool:
    """Whether the op may round tokens for its own weights; the reader's are those of another op."""
    from penstock.ops.float8 import can_take
    from penstock.ops.weight import Weight

    own = (value for name, value in given.items() if name != "reader")
    weights = (value for value in own if isinstance(value, Weight))
    return any(can_take(part) for weight in weights for part in weight.parts)


def _compare_route(check: OpCheck, reference: Run, run: Run, given: Given) -> Any:
    """Accepts other experts that are nearly as likely, if their weights are right."""
    import torch

    expected_x, expected_weights, _, expected_shared = _expected(reference, given)
    every = {**given, "k": given["router"].shape[0], "normalize": False}
    _, probabilities, order, _ = _expected(reference, every)
    x, weights, ids, shared = seen = run(**given)
    of_chosen = (
        torch.zeros_like(probabilities).scatter_(1, order, probabilities).gather(1, ids.long())
    )
    if given["normalize"]:
        of_chosen = of_chosen / of_chosen.sum(-1, keepdim=True)
    check.record("norm_route", x, expected_x)
    check.record("norm_route weights", weights, expected_weights)
    check.record("norm_route ids", weights, of_chosen)
    if shared is not None:
        check.record("norm_route shared expert", shared, expected_shared)
    return seen


def _compare_rope(check: OpCheck, reference: Run, run: Run, given: Given) -> Any:
    """Also compares the written keys and values, which are cleared between the two runs."""
    import torch

    from penstock.ops.reference import kv_codes

    places, pools = given["kv_index"], [given[name].flatten(0, 1) for name in ("keys", "values")]
    scales = (None, None) if given["kv_scales"] is None else given["kv_scales"].flatten(1, 2)

    def read() -> list[Tensor]:
        return [kv_codes.read_pages(pool, own, places) for pool, own in zip(pools, scales)]

    expected = _expected(reference, given)
    stored = read()
    for pool, own in zip(pools, scales):
        (pool if own is None else own)[places] = float("nan")
        if own is not None:
            pool.view(torch.uint8)[places] = 0
    seen = run(**given)
    check.record("rope_and_store", seen, expected)
    for name, mine, there in zip(("keys", "values"), read(), stored):
        check.record(f"rope_and_store {name}", mine, there)
    return seen


def _compare_delta_net(check: OpCheck, reference: Run, run: Run, given: Given) -> Any:
    """Also compares the states, which both start from the same values."""
    from penstock.ops import whole_states

    slots, backlog = given["state_slots"], given["backlog"]
    pools = (given["conv"], given["recurrent"], *(() if backlog is None else backlog[:1]))
    before = [pool[slots] for pool in pools]
    expected = _expected(reference, given)
    states = whole_states(given["recurrent"], backlog, slots)
    for pool, was in zip(pools, before):
        pool[slots] = was
    seen = run(**given)
    check.record("gated_delta_net", seen, expected)
    written = whole_states(given["recurrent"], backlog, slots)
    check.record("gated_delta_net states", written, states)
    return seen


_COMPARISONS: dict[str, Callable[[OpCheck, Run, Run, Given], Any]] = {
    "linear": _compare_results,
    "norm_linear": _compare_results,
    "swiglu_linear": _compare_results,
    "paged_attention": _compare_results,
    "sparse_mlp": _compare_results,
    "norm_route": _compare_route,
    "rope_and_store": _compare_rope,
    "gated_delta_net": _compare_delta_net,
}


def layers_of_each_kind(runner: Runner) -> Runner:
    """A runner without graphs that runs one layer of each kind, and the last one."""
    from penstock.engine.graphs import warmup_layers

    caches: Any = warmup_layers(runner.model, runner.caches)
    return dataclasses.replace(runner, caches=caches, **NO_GRAPHS)


def check_ops(dtype: str, shape: str, step: Callable[[], object]) -> OpError:
    """The worst op of a step that is launched op by op. Raises an error if one is wrong."""
    from penstock.ops.dispatch import watched

    check = OpCheck(dtype)
    with watched(check):
        step()
    found = check.worst()
    if not found.of_limit <= 1:
        raise PenstockError(
            f"{found.op} differs from its reference at {shape}",
            f"{found.num_wrong:,} of {found.num_rows:,} rows differ, the worst by "
            f"{found.error:.2%} of what "
            f"the op adds to it: {found.of_limit:.1f} times the limit of {dtype}.",
            "This is a bug. Times of wrong results are worthless, so nothing was timed.",
        )
    return found


def check_graphs(
    dtype: str, shape: str, runner: Runner, plan: StepPlan, reset: Callable[[], None]
) -> float:
    """The median row's difference between a captured step and one launched kernel by kernel."""
    reset()
    replayed = runner.logits(plan)
    reset()
    launched = dataclasses.replace(runner, **NO_GRAPHS).logits(plan)
    differences = (replayed - launched).norm(dim=1) / launched.norm(dim=1)
    median, tolerance = float(differences.median()), TOLERANCES[dtype]
    num_far = int((~(differences <= 5 * tolerance)).sum())
    if not median <= tolerance or num_far > FAR_ROWS * len(differences):
        raise PenstockError(
            f"At {shape}, a captured step gives different logits than the same kernels launched "
            "one by one",
            f"The median row differs by {median:.2%}, and {num_far:,} of {len(differences):,} by "
            "more than "
            f"{5 * tolerance:.1%}; the limits are {tolerance:.1%} and {FAR_ROWS:.0%} ({dtype}).",
            "This is a bug. Times of wrong results are worthless, so nothing was timed.",
        )
    return median
