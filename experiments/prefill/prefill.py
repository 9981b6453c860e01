"""Times each changed kernel alone beside the old one; checks bits first. Writes $OUT/prefill_kernels.json."""
import importlib.util, json, os, statistics, sys, traceback
sys.path[:0] = [os.getcwd(), os.path.join(os.getcwd(), "tests")]
import torch
from penstock.ops.float8 import RoundedTokens
from penstock.ops.reference.rows import TokenBlocks
from penstock.layers.inputs import RowSpan
from penstock.ops.triton import delta_net_blocks as blocks_, fp8, prefill_attention, launch
from penstock.ops.triton.delta_net_convolve import convolve_kernel

spec = importlib.util.spec_from_file_location("old_convolve", "experiments/prefill/old_convolve.py")
old = importlib.util.module_from_spec(spec); spec.loader.exec_module(old)
DEV, BF = torch.device("cuda"), torch.bfloat16
OPT = launch.launch_options(DEV)
SHAPE = (16, 32, 128, 128)
HEADS = blocks_._head_constants(SHAPE)
C, WIDTH = 8192, 8192 + 4096 + 64
found = {"gpu": torch.cuda.get_device_name(), "us": {}, "same bits": {}}


def graph_us(calls, repeats=15):
    """us per launch of a graph of 30 launches, over the buffers of `calls`."""
    for call in calls: call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(30): calls[i % len(calls)]()
    times = []
    for _ in range(repeats):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record(); graph.replay(); b.record(); b.synchronize()
        times.append(a.elapsed_time(b) * 1000 / 30)
    return round(statistics.median(times), 2)


def record(name, calls):
    try:
        found["us"][name] = graph_us(calls)
        print(name, found["us"][name], flush=True)
    except Exception as error:
        print(name, "failed", repr(error)[:300], flush=True)


def guarded(part):
    try: part()
    except Exception: traceback.print_exc()
    torch.cuda.empty_cache()


def convolve(rows, tokens, copies):
    spans = [RowSpan(tokens, tokens)] * rows
    total = rows * tokens
    table = TokenBlocks.of(spans, DEV).table
    starts = torch.arange(rows + 1, device=DEV) * tokens
    lens = torch.full((rows,), tokens, device=DEV); slots = torch.arange(rows, device=DEV) + 1
    torch.manual_seed(0)
    weight = torch.randn(4, C, device=DEV, dtype=BF); ring = torch.randn(rows + 1, 4, C, device=DEV, dtype=BF)
    mixed = [torch.randn(total, WIDTH, device=DEV, dtype=BF) for _ in range(copies)]
    outs = [torch.empty(len(table), 64, C, device=DEV, dtype=BF) for _ in range(copies)]
    def call(kernel, tile, x, out):
        kernel[64, len(table)](x, weight, ring, starts, lens, slots, table, out, x.stride(0), ring.stride(0),
            NUM_TAPS=4, BLOCK_C=128, **HEADS, RING=4, **tile, **OPT)
    base = {"RUN": 8, "num_warps": 8, "num_stages": 1, "maxnreg": 64}
    call(old.convolve_kernel, base, mixed[0], outs[0]); want = outs[0].clone(); outs[0].fill_(float("nan"))
    call(convolve_kernel, base, mixed[0], outs[0])
    found["same bits"][f"convolve {total}"] = torch.equal(want, outs[0])
    print("convolve same bits", total, found["same bits"][f"convolve {total}"], flush=True)
    record(f"convolve {total} old", [lambda x=x, o=o: call(old.convolve_kernel, base, x, o) for x, o in zip(mixed, outs)])
    forms = ((8, 8, 64), (8, 8, 72), (8, 8, 80), (8, 8, 96), (8, 4, 128), (8, 4, 104), (16, 4, 80), (16, 4, 104), (16, 8, 64), (4, 8, 80), (4, 4, 128))
    for run, warps, limit in forms:
        tile = {"RUN": run, "num_warps": warps, "num_stages": 1, "maxnreg": limit}
        record(f"convolve {total} new {run} {warps} {limit}", [lambda x=x, o=o: call(convolve_kernel, tile, x, o) for x, o in zip(mixed, outs)])
    record(f"convolve {total} old again", [lambda x=x, o=o: call(old.convolve_kernel, base, x, o) for x, o in zip(mixed, outs)])


def norm(rows, tokens, copies):
    total = rows * tokens
    table = TokenBlocks.of([RowSpan(tokens, tokens)] * rows, DEV).table
    slots = torch.arange(rows, device=DEV) + 1
    counts = torch.zeros(rows + 1, 32, dtype=torch.int32, device=DEV)
    torch.manual_seed(1)
    weight = torch.rand(128, device=DEV)
    mixed = [torch.randn(total, WIDTH, device=DEV, dtype=BF) for _ in range(copies)]
    read = [torch.randn(total, 4096, device=DEV, dtype=BF) for _ in range(copies)]
    to = [fp8.new_codes(total, 4096, DEV) for _ in range(copies)]
    def call(x, out, codes, scales, warps=8):
        blocks_._norm_kernel[32, len(table)](x, weight, table, slots, counts, out, codes, scales, 1e-6, x.stride(0),
            0 if scales is None else scales.stride(0), MOST_LATE=3, **HEADS, PADDED_V=128, num_warps=warps, **OPT)
    out = read[0].clone(); call(mixed[0], out, None, None)
    codes, scales, _ = fp8.quantize_tokens(out)
    call(mixed[0], read[0], *to[0])
    same = torch.equal(codes.view(torch.uint8), to[0][0].view(torch.uint8)) and torch.equal(scales, to[0][1])
    found["same bits"][f"norm {total}"] = same
    print("norm same bits", total, same, flush=True)
    def two(x, o):
        call(x, o, None, None); fp8.quantize_tokens(o)
    record(f"norm {total} alone", [lambda x=x, o=o: call(x, o, None, None) for x, o in zip(mixed, read)])
    record(f"norm {total} old: norm, then codes", [lambda x=x, o=o: two(x, o) for x, o in zip(mixed, read)])
    for warps in (4, 8, 16):
        record(f"norm {total} new: codes, {warps} warps", [lambda x=x, o=o, t=t: call(x, o, *t, warps) for x, o, t in zip(mixed, read, to)])


def attention(rows, tokens, copies):
    total = rows * tokens
    spans = [RowSpan(tokens, tokens)] * rows
    cut = TokenBlocks.of(spans, DEV)
    starts = torch.arange(rows + 1, device=DEV) * tokens
    lens = torch.full((rows,), tokens, device=DEV)
    pages = tokens // 64
    table = (torch.arange(rows * pages, device=DEV, dtype=torch.int32) + 1).view(rows, pages)
    torch.manual_seed(2)
    keys, values = (torch.randn(rows * pages + 1, 64, 2, 256, device=DEV, dtype=BF) for _ in range(2))
    qs = [torch.randn(total, 16, 256, device=DEV, dtype=BF) for _ in range(copies)]
    gates = [torch.randn(total, 9216, device=DEV, dtype=BF)[:, 4096:8192] for _ in range(copies)]
    outs = [torch.empty(total, 4096, device=DEV, dtype=BF) for _ in range(copies)]
    tos = [RoundedTokens(*fp8.new_codes(total, 4096, DEV), total, BF) for _ in range(copies)]
    def call(q, g, o, to=None):
        prefill_attention.prefill_attention(o, q, keys, values, None, table, starts, lens, cut, 256**-0.5, 0, g, to,
            num_tokens=total, deterministic=False)
    call(qs[0], gates[0], outs[0]); codes, scales, _ = fp8.quantize_tokens(outs[0])
    call(qs[0], gates[0], outs[0], tos[0])
    same = torch.equal(codes.view(torch.uint8), tos[0].codes.view(torch.uint8)) and torch.equal(scales, tos[0].scales)
    found["same bits"][f"attention {total}"] = same
    print("attention same bits", total, same, flush=True)
    def two(q, g, o):
        call(q, g, o); fp8.quantize_tokens(o)
    record(f"attention {total} alone", [lambda q=q, g=g, o=o: call(q, g, o) for q, g, o in zip(qs, gates, outs)])
    record(f"attention {total} old: then codes", [lambda q=q, g=g, o=o: two(q, g, o) for q, g, o in zip(qs, gates, outs)])
    record(f"attention {total} new: codes", [lambda q=q, g=g, o=o, t=t: call(q, g, o, t) for q, g, o, t in zip(qs, gates, outs, tos)])


def rope(rows, tokens, copies):
    """Not changed: other tiles of `rope_and_store`, whose heads are one warp each: same bits."""
    from penstock.ops import tuning
    from penstock.ops.triton.attention import rope_and_store
    total = rows * tokens
    x = [torch.randn(total, 9216, device=DEV, dtype=BF) for _ in range(copies)]
    norm_weight = torch.rand(256, device=DEV)
    angles = torch.rand(tokens, 2, 32, device=DEV)
    positions = torch.arange(total, device=DEV) % tokens
    index = torch.arange(total, device=DEV)
    keys, values = (torch.empty(total // 64 + 1, 64, 2, 256, device=DEV, dtype=BF) for _ in range(2))
    def call(one):
        q, _, k, v = one.split((4096, 4096, 512, 512), dim=1)
        return rope_and_store(q.unflatten(1, (16, 256)), k.unflatten(1, (2, 256)), v.unflatten(1, (2, 256)),
            norm_weight, norm_weight, 1e-6, angles, positions, index, keys, values)
    for heads in (1, 2, 4, 8, 16):
        tile = {"BLOCK_HEADS": heads, "num_warps": heads, "num_stages": 1}
        with tuning.trials({"rope_and_store/16x2x256/1": tile}):
            record(f"rope {total}, {heads} heads", [lambda one=one: call(one) for one in x])


def listing(rows, tokens, copies):
    """Not changed: other blocks of the list of pairs."""
    from penstock.ops.triton import moe_permute
    total = rows * tokens
    ids = [torch.rand(total, 256, device=DEV).topk(8).indices.int() for _ in range(copies)]
    counters = torch.zeros(4096, dtype=torch.int32, device=DEV)
    def call(one, block):
        order = one.new_empty(257 * total); n = total * 8 // 128 + 256 + total // 128
        tiles = one.new_empty(n, 4)
        moe_permute._list_tiles_kernel[launch.cdiv(total * 9, block),](one, counters, order, tiles, total, n, E=256,
            TOP_K=8, SLOTS=9, IS_ALONE=False, BLOCK=block, BLOCK_E=256, BLOCK_M=128, num_warps=min(16, max(4, block // 64)), **OPT)
    for block in (256, 512, 1024, 2048):
        record(f"list of pairs {total}, {block} a program", [lambda one=one: call(one, block) for one in ids])


for rows, copies in ((8, 8), (1, 30)):
    for part in (convolve, norm, attention, rope, listing):
        guarded(lambda: part(rows, 1024, copies))
        with open(os.path.join(os.environ.get("OUT", "."), "prefill_kernels.json"), "w") as file:
            json.dump(found, file, indent=1)
