"""OpenAI's files and batches: files of requests that run while the engines have free rows."""
