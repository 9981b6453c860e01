"""Trains the embedded model within a time budget and writes a model folder.

    python -m training.train --out DIR --minutes 12 [--resume]

A run that is stopped (SIGTERM, --pause-after) saves a checkpoint; --resume continues it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from penstock.errors import PenstockError
from training.config import ModelConfig, TrainConfig
from training.corpus import ConversationCorpus
from training.problems.mixture import DEFAULT_SHARES, SHARES
from training.run import Run, RunSettings

VOCAB_MULTIPLE = 64  # rows of the embedding: GEMMs are faster with such sizes


def parse_flags(argv: Sequence[str] | None) -> argparse.Namespace:
    train, run = TrainConfig(), RunSettings(out=Path())
    parser = argparse.ArgumentParser(prog="training.train", description="Train the embedded model.")
    parser.add_argument(
        "--out", type=Path, required=True, help="folder for checkpoint, log and model"
    )
    parser.add_argument(
        "--minutes", type=float, default=12.0, help="the whole budget, over all resumptions"
    )
    parser.add_argument(
        "--pause-after", type=float, metavar="MINUTES", help="save and stop this process then"
    )
    parser.add_argument("--resume", action="store_true", help="go on with the run in --out")
    parser.add_argument(
        "--init", type=Path, metavar="MODEL", help="start from this folder's weights and tokenizer"
    )
    parser.add_argument(
        "--tokenizer", type=Path, metavar="DIR", help="default: OUT/tokenizer, made when absent"
    )
    parser.add_argument("--device", default="cuda", help="cuda, or cpu to try things out")
    parser.add_argument(
        "--workers", type=int, default=run.num_workers, help="processes that make data; 0: none"
    )
    parser.add_argument("--row-lens", type=int, nargs="+", default=train.row_lens)
    parser.add_argument("--tokens-per-batch", type=int, default=train.tokens_per_batch)
    parser.add_argument(
        "--layers",
        type=int,
        metavar="N",
        help="default: those of --init, or 12; more are added on top",
    )
    parser.add_argument(
        "--shares",
        type=parse_share,
        nargs="+",
        metavar="KIND=SHARE",
        help="what to train on, by conversations (mixture.py's)",
    )
    parser.add_argument(
        "--first-token-weight",
        type=float,
        default=train.first_token_weight,
        help="a reply's first token weighs as this many",
    )
    parser.add_argument("--peak-lr", type=float, default=train.peak_lr)
    parser.add_argument(
        "--reuse", type=int, default=train.max_reuse, help="uses of a batch while data is short"
    )
    parser.add_argument(
        "--chunk", type=int, default=train.delta_chunk, help="tokens in a chunk of the delta rule"
    )
    parser.add_argument("--seed", type=int, default=train.seed)
    parser.add_argument("--no-graphs", action="store_true", help="launch every kernel by itself")
    parser.add_argument("--compile", action="store_true", help="torch.compile every layer first")
    parser.add_argument(
        "--tf32", action="store_true", help="fp32 products on tensor cores, at 10 bits"
    )
    parser.add_argument(
        "--evaluate-every", type=float, default=run.evaluate_every_s, metavar="SECONDS"
    )
    parser.add_argument(
        "--problems", type=int, default=run.num_problems, help="asked on the way; 4x at the end"
    )
    parser.add_argument(
        "--no-check", action="store_true", help="do not load the export with transformers"
    )
    return parser.parse_args(argv)


def parse_share(text: str) -> tuple[str, float]:
    kind, _, share = text.partition("=")
    if kind not in SHARES:
        raise argparse.ArgumentTypeError(f"{kind!r} is no kind; there are {', '.join(SHARES)}")
    return kind, float(share)


def main(argv: Sequence[str] | None = None) -> int:
    flags = parse_flags(argv)
    if flags.tf32:
        torch.set_float32_matmul_precision("high")
    shares = dict(flags.shares) if flags.shares else DEFAULT_SHARES
    corpus = ConversationCorpus.open(
        flags.tokenizer or flags.init or flags.out / "tokenizer", shares
    )
    start = ModelConfig() if flags.init is None else ModelConfig.of_folder(flags.init)
    model_config = ModelConfig(
        vocab_size=-(-corpus.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE,
        num_layers=flags.layers or start.num_layers,
    )
    train_config = TrainConfig(
        seed=flags.seed,
        row_lens=tuple(flags.row_lens),
        tokens_per_batch=flags.tokens_per_batch,
        peak_lr=flags.peak_lr,
        max_reuse=flags.reuse,
        delta_chunk=flags.chunk,
        first_token_weight=flags.first_token_weight,
    )
    settings = RunSettings(
        out=flags.out,
        budget_s=flags.minutes * 60,
        pause_after_s=None if flags.pause_after is None else flags.pause_after * 60,
        device=flags.device,
        num_workers=flags.workers,
        use_graphs=not flags.no_graphs,
        use_compile=flags.compile,
        resume=flags.resume,
        init=flags.init,
        evaluate_every_s=flags.evaluate_every,
        num_problems=flags.problems,
        check_export=not flags.no_check,
    )
    try:
        Run(corpus, model_config, train_config, settings).train()
    except PenstockError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
