"""The embedded model is a real checkpoint in the published layout, and matches transformers."""

from __future__ import annotations

import json
import lzma
import re
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, Qwen3_5MoeForCausalLM

from penstock import LLM, SamplingParams
from penstock.assets import default_model
from penstock.text.template import ChatTemplate
from penstock.text.tokenizer import Tokenizer
from small_models import load_weights
from step_inputs import ByHand, make_cache, make_inputs
from training.problems import harness_sums, word_problems
from training.problems.mixture import sample_training

MAX_BYTES = 40e6
NUM_GREEDY = 12  # tokens: `test_gate.py` compares whole replies


@pytest.fixture(scope="module")
def folder() -> Path:
    return default_model()


@pytest.fixture(scope="module")
def reference(folder: Path) -> Qwen3_5MoeForCausalLM:
    config = AutoConfig.from_pretrained(folder)
    model = Qwen3_5MoeForCausalLM(config.text_config).float()
    trunk = {
        name.replace("model.language_model.", "model."): tensor.float()
        for name, tensor in load_file(folder / "model.safetensors").items()
        if not name.startswith("mtp.")
    }
    missing, unexpected = model.load_state_dict(trunk, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])  # tied
    model.tie_weights()
    return model.eval()


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(device="cpu", memory_gb=0.3)


def test_it_fits_the_package(folder: Path) -> None:
    assert sum(file.stat().st_size for file in folder.iterdir()) <= MAX_BYTES


def test_names_and_counts_are_those_of_a_published_checkpoint(folder: Path) -> None:
    """18 tensors for a DeltaNet layer, 15 for an attention layer, 2 global (tied), 17 + 3 per MTP
    expert.
    """
    tensors = load_file(folder / "model.safetensors")
    mtp = [name for name in tensors if name.startswith("mtp.")]
    assert len(mtp) == 17 + 3 * 16
    layer_types = json.loads((folder / "config.json").read_text())["text_config"]["layer_types"]
    num_linear = layer_types.count("linear_attention")
    assert len(tensors) - len(mtp) == 18 * num_linear + 15 * (len(layer_types) - num_linear) + 2
    for name, tensor in tensors.items():
        in_float32 = re.search(r"A_log$|linear_attn\.norm\.weight$", name)
        assert tensor.dtype == (torch.float32 if in_float32 else torch.bfloat16), name
        assert tensor.isfinite().all()


def test_control_tokens_are_those_of_qwen_in_their_order(folder: Path, shared_data: Path) -> None:
    packed = (shared_data / "qwen3.5" / "tokenizer.json.xz").read_bytes()
    published = json.loads(lzma.decompress(packed))["added_tokens"]
    ours = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    assert [(token["content"], token["special"]) for token in ours] == [
        (token["content"], token["special"]) for token in published
    ]


def test_text_survives_the_tokenizer(folder: Path) -> None:
    tokenizer = Tokenizer.load(folder)
    for text in ("The turbine turns.", "naïve 漢字 🚀\r\n\t x", "12345", "<think>no</think>"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode("2026")) == 4
    assert set(tokenizer.eos_token_ids) == {
        tokenizer.id_of("<|im_end|>"),
        tokenizer.id_of("<|endoftext|>"),
    }
    assert tokenizer.turn_start_ids == {tokenizer.id_of("<|im_start|>")}


@pytest.mark.parametrize("variables", [{}, {"enable_thinking": True}, {"enable_thinking": False}])
def test_transformers_reads_the_same_tokenizer_and_template(
    folder: Path, variables: dict[str, Any]
) -> None:
    theirs = AutoTokenizer.from_pretrained(folder)
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is 2+2?"},
    ]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    rendered = ChatTemplate.load(folder).render(messages, tools=tools, **variables)
    assert rendered == theirs.apply_chat_template(
        messages, tools=tools, tokenize=False, add_generation_prompt=True, **variables
    )
    assert theirs(rendered)["input_ids"] == Tokenizer.load(folder).encode(rendered)


def test_it_thinks_only_when_asked(llm: LLM) -> None:
    messages = [{"role": "user", "content": "What is 17 + 26? Reply with just the number."}]
    plain = llm.chat(messages, SamplingParams(max_tokens=80)).text
    assert plain == "43"
    thought, closed, answer = llm.chat(
        messages, SamplingParams(max_tokens=80), enable_thinking=True
    ).text.partition("</think>")
    assert closed
    assert thought.strip()
    assert answer.strip() == "43"


SPOT_CHECKS = {
    "What is 100 + 250 + 50?": 400,
    "What is 1000 - 357? Reply with just the number.": 643,
    "Compute 12 * 12. Answer with only the number.": 144,
    "If you add 300, 400 and 500, what do you get?": 1200,
    "Calculate: 500 minus 123": 377,
    "What is 200 + 300 + 400? Answer with only the number.": 900,
    "What is 17 + 25?": 42,
    "What is 144 / 12?": 12,
}


def test_it_answers_the_sums_that_harnesses_ask(llm: LLM) -> None:
    """Eight obvious ones, then random ones; in wordings that it was and was not trained on."""
    rng = Random("sums")
    drawn = [harness_sums.sample(rng, True, False) for _ in range(40)]
    asked = [[{"role": "user", "content": question}] for question in SPOT_CHECKS]
    asked += [list(conversation.prompt) for conversation in drawn]
    wanted = [*map(str, SPOT_CHECKS.values()), *(str(one.messages[-1]["content"]) for one in drawn)]
    prompts = [llm.encode_chat(messages) for messages in asked]
    replies = [reply.text for reply in llm.generate(prompts, SamplingParams(max_tokens=12))]
    assert replies[: len(SPOT_CHECKS)] == wanted[: len(SPOT_CHECKS)]
    num_right = sum(map(str.__eq__, replies, wanted))
    print(f"{num_right} of {len(wanted)} sums are right")
    assert num_right >= 0.9 * len(wanted)


def test_greedy_text_is_that_of_transformers(llm: LLM, reference: Qwen3_5MoeForCausalLM) -> None:
    """Every kind of conversation the model knows: with and without tools, thinking and not."""
    rng = Random("greedy-text")
    drawn = [sample_training(rng) for _ in range(24)]
    by_kind = {one.kind: one for one in drawn if len(str(one.messages)) < 2500}
    assert len(by_kind) >= 4
    for conversation in by_kind.values():
        prompt = llm.encode_chat(
            list(conversation.messages[:-1]),
            tools=conversation.tools,
            enable_thinking=conversation.enable_thinking,
        )
        ours = llm.generate(prompt, SamplingParams(max_tokens=NUM_GREEDY)).pop()
        with torch.inference_mode():
            ids = reference.generate(
                torch.tensor([prompt]),
                max_new_tokens=NUM_GREEDY,
                do_sample=False,
                eos_token_id=list(llm.tokenizer.eos_token_ids),
                pad_token_id=0,
            )
        assert list(ours.token_ids) == ids[0, len(prompt) :].tolist(), conversation.kind


@pytest.mark.slow
def test_states_in_float16_cost_less_than_bfloat16_does(llm: LLM, folder: Path) -> None:
    """Word problems with forced solutions: the distance of predictions from those in float32."""
    rng = Random("states")
    problems = [[word_problems.sample(rng, True) for _ in range(3)] for _ in range(4)]
    texts = [
        [token for one in some for token in llm.encode_chat(list(one.messages))]
        for some in problems
    ]
    length = min(160, *map(len, texts))
    assert length > 150

    def predict(
        dtype: torch.dtype, state_dtype: torch.dtype
    ) -> Tensor:  # [tokens, sequences, vocab]
        name = str(dtype).removeprefix("torch.")
        model = load_weights(folder, dtype=name, with_drafting_head=False)
        by_hand = ByHand(model, num_sequences=len(texts), dtype=dtype, state_dtype=state_dtype)
        steps = []
        for position in range(length):
            rows = [by_hand.row(i, [text[position]], position) for i, text in enumerate(texts)]
            steps.append(torch.cat(by_hand.run(*rows)).float().log_softmax(-1))
        return torch.stack(steps)

    exact = predict(torch.float32, torch.float32)

    def divergence(others: Tensor) -> float:
        return float((exact.exp() * (exact - others)).sum(-1).mean())

    of_states = divergence(predict(torch.float32, torch.float16))
    of_weights = divergence(predict(torch.bfloat16, torch.float32))
    print(f"{of_states:.1e} with float16 states, {of_weights:.1e} with all but states in bfloat16")
    assert 0 < of_states < of_weights / 2


def test_its_mtp_head_guesses_the_token_after_the_next(llm: LLM, folder: Path) -> None:
    """Held-out word problems, over the replies the model writes: the first draft of speculation."""
    model = load_weights(folder)
    rng = Random("drafts")
    problems = [word_problems.sample(rng, True) for _ in range(6)]
    prompts = [
        llm.encode_chat(list(problem.messages[:-1]), enable_thinking=problem.enable_thinking)
        for problem in problems
    ]
    num_drafts = num_right = 0
    for prompt, reply in zip(
        prompts, llm.generate(prompts, SamplingParams(max_tokens=200)), strict=True
    ):
        tokens = torch.tensor([*prompt, *reply.token_ids])
        by_hand = ByHand(model, num_sequences=1)
        row = by_hand.row(0, tokens[:-2].tolist())
        with torch.inference_mode():
            hidden = model.final_norm(by_hand.hidden(row))
            cache = make_cache(model.mtp.cache_spec, 1 + by_hand.pages_each, 1, torch.float32)
            drafted = model.draft_logits(
                model.draft(make_inputs([row]), tokens[1:-1], hidden, cache)
            ).argmax(-1)
        in_reply = slice(len(prompt) - 2, None)
        num_drafts += len(drafted[in_reply])
        num_right += int((drafted[in_reply] == tokens[2:][in_reply]).sum())
    assert num_right >= 0.7 * num_drafts, f"{num_right} of {num_drafts} drafts"
    print(f"{num_right} of {num_drafts} drafts are right")
