"""Trains the embedded model's tokenizer: byte-level BPE on the conversations of its training data.

    python -m training.tokenizer OUT [--words 2527] [--conversations 30000] [--seed 1]

Follows Qwen3.5: NFC, the same pre-tokenization, one token per digit, the same special tokens in the
same order after the vocabulary. The same seed gives the same files. Prints the lengths of
conversations in tokens.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from random import Random

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Model

from penstock.text.template import ChatTemplate
from training.encode import encode, render_prompt
from training.problems.mixture import sample_training

ASSETS = Path(__file__).resolve().parents[1] / "penstock" / "assets" / "penstock-tiny"

# Words with a preceding symbol, single digits, runs of other symbols with the end of line, ends of
# lines, spaces.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}|"
    r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# In the order of their ids. The plain ones are part of the visible text of a reply.
CONTROL_TOKENS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>",
    "<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>",
    "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>", "<tool_call>", "</tool_call>",
    "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>",
    "<|file_sep|>", "<tool_response>", "</tool_response>", "<think>", "</think>", "<|audio_start|>",
    "<|audio_end|>", "<tts_pad>", "<tts_text_bos>", "<tts_text_eod>", "<tts_text_bos_single>",
    "<|audio_pad|>",
)  # fmt: skip
PLAIN_TOKENS = frozenset(
    CONTROL_TOKENS[CONTROL_TOKENS.index("<tool_call>") : CONTROL_TOKENS.index("<|audio_start|>")]
)
END_OF_TURN, PADDING = "<|im_end|>", "<|endoftext|>"


def train_tokenizer(
    template: ChatTemplate, num_words: int, num_conversations: int, seed: int
) -> Model:
    """`num_words` entries, including the 256 bytes, followed by the control tokens."""
    tokenizer = Model(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=num_words,
        min_frequency=2,
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(_texts(template, num_conversations, seed), trainer)
    tokenizer.add_tokens(
        [
            AddedToken(text, special=text not in PLAIN_TOKENS, normalized=False)
            for text in CONTROL_TOKENS
        ]
    )
    return tokenizer


def _texts(template: ChatTemplate, num_conversations: int, seed: int) -> Iterator[str]:
    """Text that the model reads and writes, without control tokens: BPE must not merge them."""
    rng = Random(seed)
    for _ in range(num_conversations):
        conversation = sample_training(rng)
        text = render_prompt(conversation, template) + conversation.completion
        for token in CONTROL_TOKENS:
            if token in text:
                text = text.replace(token, "\0")
        yield from text.split("\0")


def save_tokenizer(tokenizer: Model, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TURN,
        "pad_token": PADDING,
        "bos_token": None,
        "unk_token": None,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 8192,
    }
    (folder / "tokenizer_config.json").write_text(
        json.dumps(config, indent=2) + "\n", encoding="utf-8"
    )


def report_lengths(
    tokenizer: Model, template: ChatTemplate, num_conversations: int, seed: int
) -> str:
    """A table of tokens by kind: of the whole conversation, and of the model's part."""
    rng = Random(seed)
    lengths: dict[str, list[tuple[int, int]]] = {}
    for _ in range(num_conversations):
        conversation = sample_training(rng)
        token_ids, first_target = encode(conversation, _Encoder(tokenizer), template)
        lengths.setdefault(conversation.kind, []).append(
            (len(token_ids), len(token_ids) - first_target)
        )
    lines = [
        f"{'kind':<14} {'share':>6} {'mean':>6} {'median':>6} {'95 %':>6} {'most':>6} "
        f"{'written':>8}"
    ]
    for kind, pairs in sorted(lengths.items()):
        totals = sorted(total for total, _ in pairs)
        lines.append(
            f"{kind:<14} {len(pairs) / num_conversations:>6.1%} {statistics.mean(totals):>6.0f} "
            f"{totals[len(totals) // 2]:>6} {totals[int(len(totals) * 0.95)]:>6} {totals[-1]:>6} "
            f"{statistics.mean(written for _, written in pairs):>8.1f}"
        )
    return "\n".join(lines)


class _Encoder:
    """Adapts a tokenizer that is not saved yet to the interface of `encode`."""

    def __init__(self, model: Model) -> None:
        self._model = model

    def encode(self, text: str) -> list[int]:
        return self._model.encode(text, add_special_tokens=False).ids


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the tiny model's tokenizer.")
    parser.add_argument(
        "out", type=Path, help="folder for tokenizer.json and tokenizer_config.json"
    )
    parser.add_argument(
        "--words", type=int, default=2527, help="vocabulary without the 33 control tokens"
    )
    parser.add_argument("--conversations", type=int, default=30_000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    template = ChatTemplate((ASSETS / "chat_template.jinja").read_text(encoding="utf-8"))
    tokenizer = train_tokenizer(template, arguments.words, arguments.conversations, arguments.seed)
    save_tokenizer(tokenizer, arguments.out)
    print(report_lengths(tokenizer, template, 3_000, arguments.seed + 1))
    print(
        f"{tokenizer.get_vocab_size()} tokens in {arguments.out}, {len(CONTROL_TOKENS)} of them "
        "for control"
    )


if __name__ == "__main__":
    main()
