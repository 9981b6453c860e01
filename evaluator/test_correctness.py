"""Whether an engine.py is right: every situation, compared with a reference made from the config.

    python evaluator/test_correctness.py --engine workspace/engine.py

Not a test of pytest's, in spite of its name: one [PASS] or [FAIL] line a situation, exit code 0 or
1.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from penstock.errors import PenstockError
from penstock.forge import gate
from penstock.forge.local import LocalPlayer, load_module
from penstock.forge.oracle import TOLERANCE, Oracle, allowed_distance, typical_case
from penstock.forge.target import Target, default_target
from penstock.forge.traces import correctness_traces


def main() -> int:
    arguments = read_arguments()
    target = Target.open(arguments.config, arguments.weights, arguments.device)
    module = load_module(arguments.engine)
    print(f"{arguments.engine} for {target.describe()} on {target.device}")
    traces = correctness_traces(
        target.shape, arguments.seed, num_random=arguments.traces, max_batch=arguments.max_batch
    )
    knowing = Oracle(target)
    cases = [knowing.answer(trace) for trace in traces]
    allowed = allowed_distance(knowing.rounding(typical_case(cases)), share=1.0)
    player = LocalPlayer(module, target)
    print(f"create_engine took {player.build_s:.1f} s")
    worst, num_failed = 0.0, 0
    for case in cases:
        verdict = gate.check(
            player, [case, case], allowed
        )  # with tokens on the device, then on the CPU
        worst = max(worst, verdict.worst)
        num_failed += not verdict.is_passed
        said = f"{verdict.num_calls} calls, {verdict.worst:.3f} of the tolerance"
        print(f"[PASS] {case.name}: {said}" if verdict.is_passed else f"[FAIL] {verdict.fault}")
        if not verdict.is_passed:
            player = LocalPlayer(module, target)  # an error must not affect the next situation
    tolerance = f"atol = rtol = {TOLERANCE}"
    if allowed.most > 1.0:
        print(
            f"In {target.dtype} the reference itself cannot keep it: {allowed.most:.1f} were "
            "allowed,"
            f" and {allowed.typical:.2f} in the root mean square"
        )
    print(
        f"{len(cases) - num_failed} of {len(cases)} situations are right; worst {worst:.3f} of "
        f"{tolerance}"
    )
    return 1 if num_failed else 0


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", type=Path, default=Path("workspace/engine.py"))
    parser.add_argument(
        "--config", "--model-config", type=Path, default=default_target() / "model_config.json"
    )
    parser.add_argument(
        "--weights", "--weight-dir", type=Path, default=default_target() / "weights"
    )
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda (default: auto)")
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--traces", type=int, default=6, help="random ones, beside the situations")
    parser.add_argument("--max-batch", type=int, default=64)
    return parser.parse_args()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except PenstockError as error:
        sys.exit(f"error: {error}")
