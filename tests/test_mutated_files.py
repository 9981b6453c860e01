"""Damaged checkpoints: any file either loads or gives one of our errors.

Files of a small checkpoint are mutated, one at a time, in bytes and in meaning, and read as a
server reads them, up to the first token. This runs in child processes, which reveals crashes and
the memory and time that a few bytes can cost. A mutant is identified by its number.
"""

from __future__ import annotations

import copy
import itertools
import json
import multiprocessing
import os
import random
import re
import resource
import shutil
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as LibraryTokenizer

from penstock.config import EngineConfig
from penstock.engine.engine import Engine
from penstock.errors import PenstockError
from penstock.models import build_model
from penstock.text.generation_config import checkpoint_sampling
from penstock.text.template import ChatTemplate
from penstock.text.tokenizer import Tokenizer
from small_models import HYBRID_MOE, LLAMA, drain, request

NUM_FULL = int(os.environ.get("NUM_MUTANTS", 100_000))
BATCH = 1000  # mutants of one process
MAX_S = 1.0  # of CPU time
MAX_MB = 100.0
PATIENCE_S = 120.0  # for a batch, on a machine with other load
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
INDEX = "model.safetensors.index.json"
GGUF = "model.gguf"
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor "
    "%}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MESSAGES = [{"role": "user", "content": "Hello"}]


# A checkpoint with every file that a server reads


SMALL = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "vocab_size": 320,
    "eos_token_id": 257,
    "max_position_embeddings": 256,
}
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8}
WINDOWS = {
    "use_sliding_window": True,
    "sliding_window": 32,
    "layer_types": ["sliding_attention", "full_attention"],
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
HYBRID = {
    "layer_types": ["linear_attention", "full_attention"],
    "full_attention_interval": 2,
    "linear_num_key_heads": 1,
    "linear_key_head_dim": 8,
    "linear_num_value_heads": 2,
    "linear_value_head_dim": 8,
    "shared_expert_intermediate_size": 8,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
}
FAMILIES: dict[str, dict[str, Any]] = {
    "windows": {**LLAMA, **SMALL, **WINDOWS, "model_type": "qwen3", "rope_scaling": LLAMA3_ROPE},
    "experts": {**LLAMA, **SMALL, **EXPERTS, "model_type": "qwen3_moe", "mlp_only_layers": [0]},
    "hybrid": {**HYBRID_MOE, **SMALL, **EXPERTS, **HYBRID},
}


def write_checkpoint(
    folder: Path, config: dict[str, Any], state: dict[str, torch.Tensor] | None = None
) -> Path:
    folder.mkdir()
    if state is None:
        model: Any = build_model(config, torch.float32, torch.device("meta"))
        state = {name: torch.full(place.shape, 0.02) for name, place in model.placements().items()}
    weight_map = {name: SHARDS[place % 2] for place, name in enumerate(state)}
    for shard in SHARDS:
        save_file(
            {name: state[name] for name in state if weight_map[name] == shard}, folder / shard
        )
    tokenizer_config = {
        "eos_token": {"content": "<|im_end|>"},
        "bos_token": "<|im_start|>",
        "model_max_length": 99,
    }
    for name, value in {
        INDEX: {"metadata": {"total_size": 1}, "weight_map": weight_map},
        "config.json": config,
        "generation_config.json": {"eos_token_id": [257, 256], "temperature": 0.6, "top_p": 0.9},
        "tokenizer_config.json": tokenizer_config,
    }.items():
        (folder / name).write_text(json.dumps(value))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    write_tokenizer(folder / "tokenizer.json", is_plain=folder.name != "windows")
    return folder


def write_tokenizer(file: Path, is_plain: bool) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: id for id, token in enumerate([*alphabet, "he", "ll"])}
    model = LibraryTokenizer(models.BPE(vocab, [("h", "e"), ("l", "l")]))
    split = pre_tokenizers.Split(r"\s?\p{L}+|\p{N}|[^\s\p{L}\p{N}]+|\s+", "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    model.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    model.decoder = decoders.ByteLevel()
    model.add_special_tokens(
        [AddedToken(token, special=True) for token in ("<|im_start|>", "<|im_end|>")]
    )
    if not is_plain:
        model.enable_truncation(64)
        model.enable_padding(pad_id=0, pad_token="!", length=8)
    model.save(str(file))


# Mutations

HOSTILE: tuple[Any, ...] = (
    *(
        None,
        True,
        False,
        0,
        1,
        -1,
        2,
        3,
        7,
        255,
        2**31 - 1,
        2**31,
        2**32,
        2**53 + 1,
        2**63,
        2**64,
        10**30,
    ),
    *(0.0, -0.5, 1.5, 1e-320, 1e308, float("inf"), float("-inf"), float("nan")),
    *(
        "",
        "x",
        "0",
        "\0",
        "\ud800",
        "F32",
        "BF16",
        "F4",
        "default",
        "../../etc/passwd",
        "/",
        "a" * 5000,
        "é" * 9,
    ),
    *(
        [],
        {},
        [[]],
        [None],
        [0, 0],
        [1, 2**62],
        [2**33, 2**33],
        {"": None},
        {"type": "x"},
        ["x"] * 1000,
    ),
)
NUMBERS = (0, 1, 7, 8, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1, 99_999_999, 100_000_001)


def mutate_bytes(data: bytes, draw: random.Random) -> bytes:
    changed = bytearray(data)
    start = draw.randrange(len(data))
    end = min(len(data), start + draw.choice((1, 2, 8, 64, 1000)))
    match draw.randrange(6):
        case 0:  # flipped bits
            for _ in range(draw.choice((1, 1, 2, 8, 100))):
                changed[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        case 1:  # cut off
            del changed[start:]
        case 2:  # a hole
            del changed[start:end]
        case 3:  # twice the same
            changed[start:start] = data[start:end]
        case 4:  # noise
            changed[start:end] = draw.randbytes(end - start)
        case 5:  # a piece from elsewhere
            elsewhere = draw.randrange(len(data))
            changed[start:end] = data[elsewhere : elsewhere + end - start]
    return bytes(changed)


def mutate_json(data: bytes, draw: random.Random) -> bytes:
    """Changes one to three places of the tree: another value or name, removed or duplicated."""
    tree = json.loads(data)
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        places = list(places_in(tree))
        if not places:
            break
        holder, key = draw.choice(places)
        match draw.randrange(6):
            case 0 | 1 | 2:
                holder[key] = copy.deepcopy(draw.choice(HOSTILE))
            case 3:
                other, other_key = draw.choice(places)
                holder[key] = copy.deepcopy(other[other_key])
            case 4:
                del holder[key]
            case 5 if isinstance(holder, dict):
                holder[draw.choice((key + "x", key.upper(), "", "__metadata__"))] = holder.pop(key)
    text = json.dumps(tree)
    match draw.randrange(12):
        case 0:  # the last of two equal keys counts, for most readers
            text = re.sub(r'"(\w+)": ', r'"\1": null, "\1": ', text, count=1)
        case 1:
            depth = draw.choice((50, 127, 200, 5000))
            text = text.replace(": ", ": " + "[" * depth + "]" * depth + ', "d": ', 1)
        case 2:  # more digits than Python turns into a number
            text = re.sub(r"\d+", "9" * 5000, text, count=1)
    return text.encode("utf-8", "surrogatepass")


def places_in(tree: Any) -> list[tuple[Any, Any]]:
    """Every (object or list, key) of a tree, but only some of a long list or a vocabulary."""
    found = []
    entries = list(tree.items() if isinstance(tree, dict) else enumerate(tree))
    for key, value in entries[:40] + entries[40::50]:
        found.append((tree, key))
        if isinstance(value, dict | list):
            found += places_in(value)
    return found


def mutate_header(data: bytes, draw: random.Random) -> bytes:
    """Changes a safetensors header: its JSON, or its length."""
    length = int.from_bytes(data[:8], "little")
    header, rest = data[8 : 8 + length], data[8 + length :]
    match draw.randrange(6):
        case 0:
            return draw.choice(NUMBERS).to_bytes(8, "little") + data[8:]
        case 1:
            return (length + draw.randrange(-20, 20)).to_bytes(8, "little") + data[8:]
        case 2:
            header = move_tensors(header, draw)
        case _:
            header = mutate_json(header, draw)
    return len(header).to_bytes(8, "little") + header + rest


def move_tensors(header: bytes, draw: random.Random) -> bytes:
    """Offsets and shapes that are consistent with each other and with nothing else."""
    tree = json.loads(header)
    for name in draw.sample([name for name in tree if name != "__metadata__"], 2):
        entry = tree[name]
        start, end = entry["data_offsets"]
        shift = draw.choice((-4, 1, 4, end - start, 2**32, -(2**40)))
        match draw.randrange(4):
            case 0:
                entry["data_offsets"] = [start + shift, end + shift]
            case 1:
                entry["shape"] = [*reversed(entry["shape"]), 1]
            case 2:
                entry["dtype"] = draw.choice(
                    ("F64", "F32", "F16", "BF16", "I32", "U64", "BOOL", "F8_E4M3")
                )
                entry["shape"] = [end - start]
            case 3:
                entry["data_offsets"], entry["shape"] = (
                    [start, start],
                    draw.choice(([0], [0, 2**63], [2**64, 0])),
                )
    return json.dumps(tree).encode()


Mutate = Callable[[bytes, random.Random], bytes]
Kinds = list[tuple[str, Mutate]]  # a file, and a way to change it
MUTATIONS: dict[str, tuple[Mutate, ...]] = {
    SHARDS[0]: (mutate_bytes, mutate_header),
    SHARDS[1]: (mutate_bytes, mutate_header),
    INDEX: (mutate_bytes, mutate_json),
    "config.json": (mutate_bytes, mutate_json, mutate_json),
    "tokenizer.json": (mutate_bytes, mutate_json, mutate_json),
    "tokenizer_config.json": (mutate_bytes, mutate_json),
    "generation_config.json": (mutate_bytes, mutate_json),
    "chat_template.jinja": (mutate_bytes,),
}
KINDS: Kinds = [(name, mutate) for name, mutations in MUTATIONS.items() for mutate in mutations]
TEXT_FILES = {
    name for name in MUTATIONS if "token" in name or "template" in name or "generation" in name
}


# Reading them


def use_model(folder: Path) -> None:
    """Like an engine process, up to a token."""
    config = EngineConfig(model=str(folder), device="cpu", memory_gb=0.01, page_size=16, max_rows=2)
    engine = Engine.from_config(config)
    engine.submit(request("first", (1, 2, 3), max_tokens=1, logprobs=None))
    drain(engine)


def use_text(folder: Path) -> None:
    """Like a server process."""
    folder = folder / GGUF if (folder / GGUF).is_file() else folder
    checkpoint_sampling("auto", folder)
    tokenizer, template = Tokenizer.load(folder), ChatTemplate.load(folder)
    token_ids = tokenizer.encode(template.render(MESSAGES))
    tokenizer.decode(token_ids, skip_special_tokens=False)
    assert all(0 <= id < tokenizer.vocab_size for id in tokenizer.eos_token_ids)


@dataclass(slots=True)
class Findings:
    """The results of a batch of mutants."""

    outcomes: Counter[tuple[str, str]] = field(
        default_factory=Counter
    )  # by file, and the name of the error
    defects: list[str] = field(default_factory=list)
    slowest_s: float = 0.0
    grown_mb: float = 0.0

    def add(self, other: Findings) -> None:
        self.outcomes += other.outcomes
        self.defects += other.defects
        self.slowest_s = max(self.slowest_s, other.slowest_s)
        self.grown_mb = max(self.grown_mb, other.grown_mb)


def try_mutant(
    number: int,
    folders: list[Path],
    originals: list[dict[str, bytes]],
    kinds: Kinds,
    found: Findings,
) -> None:
    name, mutate = kinds[number % len(kinds)]
    draw = random.Random(number)
    family = draw.randrange(len(folders))
    folder, original = folders[family], originals[family][name]
    (folder / name).write_bytes(mutate(original, draw))
    uses = [use_text] if name in TEXT_FILES else [use_model]
    if name in ("config.json", GGUF):
        uses.append(use_text)
    started = time.process_time()
    outcome = "loaded"
    try:
        for use in uses:
            use(folder)
    except PenstockError as error:
        outcome = type(error).__name__
        if name == GGUF and "config.json" in str(error):
            found.defects.append(f"{number}, {name}: names a file that is not there: {error}")
        if not (error.what and error.why and error.todo):
            parts = [part[:100] for part in (error.what, error.why, error.todo)]
            found.defects.append(f"{number}, {name}: not three parts: {parts}")
    except BaseException as error:  # a panic of Rust is not an Exception
        outcome = "defect"
        where = [line[:200] for line in traceback.format_exc().strip().splitlines()[-8:]]
        found.defects.append("\n".join([f"{number}, {name}: {type(error).__name__}", *where]))
    seconds = time.process_time() - started
    found.slowest_s = max(found.slowest_s, seconds)
    if seconds > MAX_S:
        found.defects.append(f"{number}, {name}: {seconds:.1f} s")
    found.outcomes[name, outcome] += 1
    (folder / name).write_bytes(original)


def try_batch(
    numbers: range, sources: list[Path], place: Path, kinds: Kinds, news: Connection
) -> None:
    """Runs in a child process. Announces each mutant before it runs, then sends the findings."""
    folders = [Path(shutil.copytree(source, place / source.name)) for source in sources]
    originals = [{file.name: file.read_bytes() for file in folder.iterdir()} for folder in folders]
    for folder in folders:  # the undamaged ones, so that everything is imported once
        use_model(folder)
        use_text(folder)
    at_start, found = peak_mb(), Findings()
    allowed = (
        num_bytes_mapped() + 8 * int(MAX_MB) * 2**20
    )  # otherwise one mutant could use up the machine's memory
    resource.setrlimit(resource.RLIMIT_AS, (allowed, allowed))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # a panic that is caught writes a page there first
    for number in numbers:
        news.send(number)
        try_mutant(number, folders, originals, kinds, found)
    found.grown_mb = peak_mb() - at_start
    news.send(found)


def peak_mb() -> float:
    return kilobytes_of("VmHWM") / 1024


def num_bytes_mapped() -> int:
    return kilobytes_of("VmSize") * 1024


def kilobytes_of(name: str) -> int:
    (number,) = re.findall(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(number)


def run_batch(numbers: range, sources: list[Path], place: Path, kinds: Kinds) -> Findings:
    """Runs a batch in a process that may crash; returns its findings."""
    forking = multiprocessing.get_context("fork")
    ours, theirs = forking.Pipe(duplex=False)
    process = forking.Process(target=try_batch, args=(numbers, sources, place, kinds, theirs))
    process.start()
    theirs.close()
    heard: Any = "nothing"
    deadline = time.monotonic() + PATIENCE_S
    try:
        while ours.poll(max(0.0, deadline - time.monotonic())):
            heard = ours.recv()
            if isinstance(heard, Findings):
                return heard
    except EOFError:
        process.join()
        return Findings(defects=[f"{heard}: the process ended with {process.exitcode}"])
    finally:
        process.kill()
        process.join()
        shutil.rmtree(place)
    return Findings(defects=[f"{heard}: it hung"])


def run_mutants(num_mutants: int, folder: Path) -> Findings:
    sources = [write_checkpoint(folder / name, config) for name, config in FAMILIES.items()]
    return run_mutants_of(sources, KINDS, num_mutants, folder)


def run_mutants_of(
    sources: list[Path], kinds: Kinds, num_mutants: int, folder: Path, batch: int = BATCH
) -> Findings:
    found = Findings()
    for start in range(0, num_mutants, batch):
        place = folder / f"batch-{start}"
        place.mkdir()
        found.add(run_batch(range(start, min(start + batch, num_mutants)), sources, place, kinds))
    return found


def check(found: Findings, num_mutants: int, kinds: Kinds = KINDS) -> None:
    assert not found.defects, f"{len(found.defects)} defects:\n" + "\n\n".join(found.defects[:20])
    assert found.outcomes.total() == num_mutants
    assert found.grown_mb < MAX_MB
    for name in {name for name, _ in kinds}:  # mutants of each file reach both ends
        outcomes = [outcome for file, outcome in found.outcomes if file == name]
        assert "loaded" in outcomes, name
        assert len(outcomes) > 1, name


def report(name: str, found: Findings, seconds: float) -> None:
    """Prints one line of JSON for results/cpu."""
    by_file = itertools.groupby(sorted(found.outcomes.items()), key=lambda entry: entry[0][0])
    line = {
        "name": name,
        "mutants": found.outcomes.total(),
        "defects": len(found.defects),
        "seconds": round(seconds, 1),
        "slowest_s": round(found.slowest_s, 4),
        "grown_mb": round(found.grown_mb, 2),
        "outcomes": {
            file: {outcome: number for (_, outcome), number in group} for file, group in by_file
        },
    }
    print(json.dumps(line))


def test_mutated_files_load_or_are_refused_in_our_own_words(tmp_path: Path) -> None:
    num_mutants = 50 * len(KINDS)
    check(run_mutants(num_mutants, tmp_path), num_mutants)


@pytest.mark.slow
@pytest.mark.timeout(2 * 3600)
def test_a_hundred_thousand_mutated_files(tmp_path: Path) -> None:
    started = time.monotonic()
    found = run_mutants(NUM_FULL, tmp_path)
    report("mutated files", found, time.monotonic() - started)
    check(found, NUM_FULL)
