"""GEMMs of 17 to 64 tokens by wgmma: correctness, then times beside `quantized_gemm.cu`.

    python experiments/wide/wide.py            both parts, each a child process with a time limit
    python experiments/wide/wide.py check | time
"""

import json
import os
import subprocess
import sys
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
START = time.time()
OUT = Path(os.environ.get("OUT", "/tmp"))
LIMITS = {"check": 45, "time": 70}


def say(*words):
    print(f"{time.time() - START:6.1f}", *words, flush=True)


if len(sys.argv) == 1:
    for part, limit in LIMITS.items():
        say("part", part)
        try:
            done = subprocess.run([sys.executable, __file__, part], timeout=limit)
            say("part", part, "ended with", done.returncode)
        except subprocess.TimeoutExpired:
            say("part", part, "took too long")
    sys.exit(0)

import torch  # noqa: E402

from penstock.ops.cuda import program as programs  # noqa: E402
from penstock.ops.cuda import quantized, quantized_wide  # noqa: E402
from penstock.ops.cuda.program import compile_source, read_source  # noqa: E402
from penstock.ops.tiles import tile as tiled  # noqa: E402
from penstock.ops.triton.norm import rms_norm  # noqa: E402
from penstock.weights.codes import Codes, Scales  # noqa: E402
from penstock.weights.packing import pack  # noqa: E402
from quantized_codes import make_codes, numbers, reals  # noqa: E402

DEVICE = torch.device("cuda", torch.cuda.current_device())
BYTES = programs.most_shared_bytes(DEVICE)
torch.manual_seed(0)


def small_rows(kind, N, K):
    if kind == "int4":
        values = numbers(-8, 8, N, K, dtype=torch.int8)
        codes = Codes(values, 4, (1, 128), Scales(reals(N, -(-K // 128), most=0.1).bfloat16()))
    else:
        codes = make_codes(kind.removesuffix(" by rows"), N, K)
    rows = pack(codes).mapped(lambda tensor: tensor.cuda())
    return tiled(rows, keeps_rows=kind.endswith("by rows"))


def tile_of(rows, num_tokens, row_groups, column_groups, cluster, sharers=0):
    """`sharers` > 0: tokens are arranged before."""
    return quantized_wide.wide_tile(
        rows, num_tokens, row_groups, column_groups, cluster, BYTES,
        sharers=max(1, sharers), is_arranged=int(sharers > 0),
    )  # fmt: skip


def run(x, rows, out, tile, **given):
    if tile is None:
        quantized.multiply(x, rows, out, **given)
    else:
        quantized.multiply_wide(x, rows, out, tile, num_tokens=len(out), **given)


@contextmanager
def recorded(jobs):
    """Launches nothing, but notes what has to be compiled."""

    def record(source, name, constants, device, *rest, is_for_one=False):
        jobs.append((source, tuple(constants.items()), f"sm_90{'a' if is_for_one else ''}"))

    with mock.patch.object(quantized, "_launch_program", record):
        yield


def compile_all(jobs):
    jobs = list(dict.fromkeys(jobs))

    def one(job):
        source, constants, architecture = job
        try:
            compile_source(read_source(source), dict(constants), architecture)
        except Exception as error:
            return str(error)[-800:]

    with ThreadPoolExecutor(16) as pool:
        failed = [error for error in pool.map(one, jobs) if error]
    say(len(jobs), "kernels compiled,", len(failed), "failed", *failed[:2])


# ---------------------------------------------------------------------------- correctness

CHECKED = [(2, 1, 1), (3, 1, 2), (1, 2, 2), (3, 1, 2, 2), (1, 2, 4, 1), (2, 1, 1, 2)]
KINDS = ["int4", "zeros", "int8", "fp8", "fp8 by rows"]


def check():
    cases, jobs = [], []
    for kind in KINDS:
        rows = small_rows(kind, 3000, 1280)
        exact = rows.dequantize().double()
        plain = torch.randn(70, 1280, device="cuda", dtype=torch.bfloat16) / 20
        exact = torch.cat([exact, plain.double()])
        for num_tokens in (17, 24, 32, 48, 64):
            x = torch.randn(num_tokens, 1280, device="cuda", dtype=torch.bfloat16)
            residual = torch.randn(num_tokens, 3071, device="cuda", dtype=torch.bfloat16)[:, :3070]
            expected = x.double() @ exact.T + residual.double()
            for place, shape in enumerate(CHECKED):
                tile = tile_of(rows, num_tokens, *shape)
                if tile is None or (num_tokens in (24, 48) and place % 2):
                    continue
                cases.append((kind, num_tokens, shape, rows, tile, x, plain, residual, expected))
    with recorded(jobs):
        for case in cases:
            launch_case(case)
    compile_all(jobs)
    results, bad = [], 0
    for case in cases:
        name = f"{case[0]}, {case[1]} tokens, {case[2]}"
        try:
            wide = launch_case(case)
            torch.cuda.synchronize()
            expected, out = case[-1], wide[:, 3:-3]
            error = float((out.double() - expected).abs().max() / expected.abs().max())
            again = launch_case(case)
            is_good = error < 1e-2 and bool(torch.equal(again[:, 3:-3], out))
            is_good &= bool(wide[:, :3].isnan().all() and wide[:, -3:].isnan().all())
            results.append([name, error, is_good])
            bad += not is_good
            if not is_good and bad < 30:
                say("WRONG", name, f"off by {error:.5f}", torch.equal(again[:, 3:-3], out))
        except Exception as problem:
            say("FAILED", name, str(problem)[-300:])
            results.append([name, None, False])
            break  # the context is lost
    say(len(results), "checked,", bad, "wrong")
    (OUT / "wide_check.json").write_text(json.dumps(results))


def launch_case(case):
    _, num_tokens, _, rows, tile, x, plain, residual, _ = case
    wide = torch.full((num_tokens, 3076), torch.nan, dtype=torch.bfloat16, device="cuda")
    given = {"plain": plain, "residual": residual}
    if tile["IS_ARRANGED"]:
        x = quantized_wide.arrange(x, rows, tile["TOKEN_TILES"])
    run(x, rows, wide[:, 3:-3], tile, **given)
    return wide


# ---------------------------------------------------------------------------- times

WIDE_64 = [(3, 1, 2), (2, 1, 2), (3, 1, 4), (2, 1, 4), (3, 1, 2, 1), (3, 1, 2, 2), (2, 1, 2, 2),
           (3, 1, 4, 1), (3, 1, 4, 2), (2, 1, 4, 2)]  # fmt: skip
WIDE_32 = [(3, 1, 2), (4, 1, 2), (3, 1, 1), (3, 1, 2, 1), (3, 1, 2, 2), (3, 1, 1, 2), (3, 1, 1, 4),
           (4, 1, 2, 2), (4, 1, 2, 1), (2, 1, 2, 2)]  # fmt: skip
DEEP_64 = [(1, 2, 4), (1, 3, 4), (2, 1, 8), (1, 2, 8), (1, 1, 4), (1, 2, 4, 1), (1, 2, 4, 2),
           (2, 1, 8, 1), (1, 3, 4, 2), (2, 1, 4, 2), (1, 1, 4, 2)]  # fmt: skip
DEEP_32 = [(1, 2, 4), (1, 3, 4), (2, 1, 8), (1, 2, 8), (1, 4, 4), (1, 2, 4, 1), (1, 2, 4, 2),
           (2, 1, 8, 1), (1, 4, 4, 1), (1, 4, 2, 2)]  # fmt: skip
HEAD_64 = [(3, 1, 2), (2, 1, 2), (3, 1, 4), (3, 1, 2, 1), (3, 1, 2, 2), (2, 1, 2, 1), (3, 1, 4, 1),
           (3, 1, 4, 2)]  # fmt: skip
HEAD_32 = [(3, 1, 2), (3, 1, 1), (4, 1, 2), (2, 1, 1, 1), (3, 1, 1, 2), (4, 1, 2, 1), (4, 1, 2, 2)]
SHAPES = [  # name, rows, columns, plain rows, kinds, tiles for 64 and for fewer tokens
    ("in_proj", 12288, 2048, 64, ("int4", "fp8 by rows"), WIDE_64, WIDE_32),
    ("qkv", 9216, 2048, 0, ("int4", "fp8 by rows"), WIDE_64, WIDE_32),
    ("out_proj", 2048, 4096, 0, ("int4", "fp8 by rows"), DEEP_64, DEEP_32),
    ("head", 248320, 2048, 0, ("int8", "fp8 by rows"), HEAD_64, HEAD_32),
]


def big_rows(kind, N, K):
    few = small_rows(kind, 256, K)
    codes = torch.randint(0, 256, (N // 16, *few.codes.shape[1:]), dtype=torch.uint8, device="cuda")
    if few.is_float8:
        codes &= 0xBF
    records = few.records[:1].expand(N // 16, *few.records.shape[1:]).contiguous()
    return replace(few, num_rows=N, codes=codes, records=records, block_scales=None)


def microseconds(launch, count):
    launch(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(count):
            launch(i)
    graph.replay()
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for _ in range(3):
        first.record()
        graph.replay()
        last.record()
        torch.cuda.synchronize()
        times.append(first.elapsed_time(last) * 1000 / count)
    return min(times)


def say_clusters(jobs):
    """How many clusters run at once, by the number of their blocks."""
    from ctypes import byref, c_int, c_uint

    seen = {}
    for source, constants, architecture in dict.fromkeys(jobs):
        sizes = dict(constants)
        if not architecture.endswith("a"):
            continue
        width = sizes["CLUSTER"] * sizes["SHARERS"]
        if width in seen:
            continue
        groups = sizes["ROW_GROUPS"] * sizes["COLUMN_GROUPS"] + 1 - sizes["IS_ARRANGED"]
        shared = sizes["SHARED_BYTES"]
        own = programs.program(source, "quantized_wide", constants, DEVICE, shared, True)
        attribute = (programs._Attribute * 1)(programs._Attribute(4, 0, width))
        attribute[0]._rest[0] = attribute[0]._rest[1] = 1
        launch = programs._Launch(
            (c_uint * 3)(width * 8, 1, 1), (c_uint * 3)(128 * groups, 1, 1), shared, None,
            attribute, 1,
        )  # fmt: skip
        count = c_int()
        code = own._driver.cuOccupancyMaxActiveClusters(byref(count), own._function, byref(launch))
        seen[width] = (count.value, code)
    say("clusters at once, by blocks:", seen)


def measure():
    results, jobs, plans = [], [], []
    for name, N, K, num_plain, kinds, for_64, for_32 in SHAPES:
        for kind in kinds:
            few = replace(small_rows(kind, 256, K), num_rows=N)
            plain = torch.randn(num_plain, K, device="cuda").bfloat16() if num_plain else None
            plan = []
            for num_tokens in (64, 32, 17):
                x = torch.randn(num_tokens, K, device="cuda").bfloat16()
                dtype = torch.float32 if name == "head" else torch.bfloat16
                shapes = for_64 if num_tokens == 64 else for_32
                if num_tokens == 64 and kind != "int4" and N in (9216, 12288):
                    shapes = [(2, 1, 2), (2, 1, 2, 1), (3, 1, 4, 1), (2, 1, 4, 2)]
                tiles = [(shape, tile_of(few, num_tokens, *shape)) for shape in shapes]
                tiles = [(None, None), *((shape, tile) for shape, tile in tiles if tile)]
                with recorded(jobs):
                    out = torch.empty(num_tokens, N + num_plain, dtype=dtype, device="cuda")
                    for _, tile in tiles:
                        run(x, few, out, tile, plain=plain)
                plan.append((x, out, tiles))
            plans.append((name, kind, N, K, plain, plan))
    compile_all(jobs)
    try:
        say_clusters(jobs)
    except Exception:
        traceback.print_exc()
    weight_of = {K: torch.ones(K, device="cuda") for K in (2048, 4096)}
    for name, kind, N, K, plain, plan in plans:
        size = big_rows(kind, 256, K).num_bytes * N // 256
        copies = max(1, min(40, 160_000_000 // size))
        rows = [big_rows(kind, N, K) for _ in range(copies)]
        count = max(copies, 4 if name == "head" else 24)
        for x, out, tiles in plan:
            norm_alone = microseconds(lambda _: rms_norm(x, weight_of[K], 1e-6), 24)
            found = []
            for shape, tile in tiles:
                try:
                    own = x
                    if tile is not None and tile["IS_ARRANGED"]:
                        own = quantized_wide.arrange(x, rows[0], tile["TOKEN_TILES"])

                    def launch(i):
                        normed = rms_norm(x, weight_of[K], 1e-6)
                        given = normed if own is x else own
                        run(given, rows[i % copies], out, tile, plain=plain)

                    took = microseconds(launch, count)
                    found.append((took, shape, tile and tile["DEPTH"]))
                except Exception as problem:
                    say("FAILED", name, kind, shape, str(problem)[-300:])
                    if "CUDA" in str(problem):
                        raise
            old = found[0][0]
            best = sorted(found[1:])
            say(name, kind, len(x), f"norm {norm_alone:.1f} old {old:.1f} |",
                "  ".join(f"{took:.1f} {shape}/{depth}" for took, shape, depth in best))  # fmt: skip
            results.append({"name": name, "kind": kind, "tokens": len(x), "norm": norm_alone,
                            "old": old, "new": best})  # fmt: skip
            (OUT / "wide.json").write_text(json.dumps(results))
        del rows


try:
    {"check": check, "time": measure}[sys.argv[1]]()
except Exception:
    traceback.print_exc()
    sys.exit(1)
