"""Between text and token ids: tokenizer, chat template, streams, requests. Never imports torch."""
