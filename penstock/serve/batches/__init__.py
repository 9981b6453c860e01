"""OpenAI's files and batches: files of requests that are answered when nobody else needs the engines."""
