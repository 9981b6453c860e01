"""OpenAI's files and batches: files of requests that run when the engines have nothing else to
do.
"""
